"""Speculative decoding: one loop, and what an assistant is built from."""

from .control import DraftLength
from .drafter import AssistantOptions, Block, Call, Draft, Drafter
from .rollout import LogitsDrafter, RolloutDrafter, RolloutOptions
from .stats import Stats
from .tree import Tree

__all__ = [
    "AssistantOptions",
    "Block",
    "Call",
    "Draft",
    "DraftLength",
    "Drafter",
    "LogitsDrafter",
    "RolloutDrafter",
    "RolloutOptions",
    "Stats",
    "Tree",
]
