"""Distillation for hfkv: train away what compression breaks, with the original model as teacher."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .losses import divergence as divergence

# resolved when it is first used: a plugin is found, and listed, without torch
_HOME = {"divergence": "losses"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hfkv_distill' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(_HOME)
