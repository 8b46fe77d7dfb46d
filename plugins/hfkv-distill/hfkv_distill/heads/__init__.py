"""Drafting heads, trained on what a frozen model thinks: its last hidden states on a text."""

from .acceptance import accepted_per_verification
from .states import OnlineStates, StoredStates, store_states
from .training import HeadsOptions, train_heads

__all__ = [
    "HeadsOptions",
    "OnlineStates",
    "StoredStates",
    "accepted_per_verification",
    "store_states",
    "train_heads",
]
