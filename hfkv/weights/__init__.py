"""Weight quantization: one config, one module class for every backend, loaded and saved by transformers itself."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .grid import Grid as Grid
    from .grid import PackedWeight as PackedWeight
    from .grouped import GroupedLinear as GroupedLinear
    from .linear import QuantizedLinear as QuantizedLinear
    from .linear import WeightHandle as WeightHandle
    from .options import WeightOptions as WeightOptions
    from .rounded import RoundedLinear as RoundedLinear
    from .rounded import RoundedOptions as RoundedOptions

# where each name lives, resolved when it is first used: the config is imported while transformers itself is
_HOME = {
    "Grid": "grid",
    "GroupedLinear": "grouped",
    "PackedWeight": "grid",
    "QuantizedLinear": "linear",
    "RoundedLinear": "rounded",
    "RoundedOptions": "rounded",
    "WeightHandle": "linear",
    "WeightOptions": "options",
}
__all__ = [
    "Grid",
    "GroupedLinear",
    "PackedWeight",
    "QuantizedLinear",
    "RoundedLinear",
    "RoundedOptions",
    "WeightHandle",
    "WeightOptions",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hfkv.weights' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
