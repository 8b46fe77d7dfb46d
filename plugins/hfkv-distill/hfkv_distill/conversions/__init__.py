"""Conversions: a model in, a smaller one of the same weights out, to be healed by distillation.

Each is a function that leaves the model that it is given as it is. What it returns is built from a config and a state
dict, as `from_pretrained` builds it, so that what is saved is what was converted.
"""

from .chain import Conversion, convert
from .depth import block_influence, choose_layers, drop_layers
from .kv_heads import merge_kv_heads
from .latents import compress_latents
from .local import make_local
from .sharing import share_layers
from .width import prune_width

__all__ = [
    "Conversion",
    "block_influence",
    "choose_layers",
    "compress_latents",
    "convert",
    "drop_layers",
    "make_local",
    "merge_kv_heads",
    "prune_width",
    "share_layers",
]
