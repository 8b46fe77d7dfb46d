"""The parts that a cache technique is built from."""

from .layer import KVLayer, LayerContext, StateShape, check_crop
from .options import CacheOptions, check_choice, check_length, option
from .packed import PackedBlocks, PackedFormat, PackedStore
from .padding import Padding
from .quantizer import KVQuantizer, round_to_grid
from .segmented import SegmentedLayer
from .view import KVHandle, KVView

__all__ = [
    "CacheOptions",
    "KVHandle",
    "KVLayer",
    "KVQuantizer",
    "KVView",
    "LayerContext",
    "PackedBlocks",
    "PackedFormat",
    "PackedStore",
    "Padding",
    "SegmentedLayer",
    "StateShape",
    "check_choice",
    "check_crop",
    "check_length",
    "option",
    "round_to_grid",
]
