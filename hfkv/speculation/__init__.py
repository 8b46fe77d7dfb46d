"""Speculative decoding: one loop, and what an assistant is built from."""

from .control import DraftLength
from .drafter import AssistantOptions, Block, Call, Draft, Drafter
from .rollout import RolloutDrafter, RolloutOptions
from .stats import Stats

__all__ = [
    "AssistantOptions",
    "Block",
    "Call",
    "Draft",
    "DraftLength",
    "Drafter",
    "RolloutDrafter",
    "RolloutOptions",
    "Stats",
]
