"""Cross-layer attention for hfkv: groups of layers share one set of keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .sharing import share as share
    from .similar import similar_groups as similar_groups

# resolved when it is first used: a plugin is found, and listed, without torch
_HOME = {"share": "sharing", "similar_groups": "similar"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hfkv_crosslayer' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(_HOME)
