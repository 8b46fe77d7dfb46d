"""Drafting heads: small modules that read a model's last hidden state, and the folder they are kept in.

The assistants of hfkv-speculative draft with them; what trains them makes and saves them here.
"""

from .base import DraftHeads
from .eagle import EagleConfig, EagleHead
from .folder import load_heads, save_heads
from .medusa import MedusaConfig, MedusaHeads

__all__ = [
    "DraftHeads",
    "EagleConfig",
    "EagleHead",
    "MedusaConfig",
    "MedusaHeads",
    "load_heads",
    "save_heads",
]
