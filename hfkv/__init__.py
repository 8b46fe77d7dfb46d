"""hfkv: KV caches, quantizers, kernels and assistants as plugins for plain Hugging Face ``model.generate``.

Importing it activates it (unless ``HFKV_AUTOLOAD=0``) and imports neither torch nor transformers.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from . import autoload

if TYPE_CHECKING:
    from .autoload import activate as activate
    from .autoload import deactivate as deactivate
    from .cache.build import make_cache as make_cache
    from .cache.memory import MemoryReport as MemoryReport
    from .cache.memory import memory as memory
    from .defaults import set_default as set_default
    from .hookspecs import hookimpl as hookimpl
    from .registry import plugins as plugins
    from .registry import register as register
    from .registry import unregister as unregister
    from .specs import AssistantSpec as AssistantSpec
    from .specs import CacheSpec as CacheSpec
    from .specs import KernelSpec as KernelSpec
    from .specs import KVQuantizerSpec as KVQuantizerSpec
    from .specs import StructureSpec as StructureSpec
    from .specs import SubcommandSpec as SubcommandSpec
    from .specs import TrainerSpec as TrainerSpec
    from .specs import WeightQuantizerSpec as WeightQuantizerSpec
    from .speculation.door import assistant as assistant
    from .speculation.stats import stats as stats
    from .weights.config import WeightConfig as WeightConfig
    from .weights.quantize import quantize_weights as quantize_weights
    from .weights.report import WeightReport as WeightReport
    from .weights.report import describe as describe

__version__ = "0.1.0"

# where each public name lives: resolved when it is first used, so that `import hfkv` stays light
_HOME = {
    "activate": "autoload",
    "deactivate": "autoload",
    "make_cache": "cache.build",
    "memory": "cache.memory",
    "MemoryReport": "cache.memory",
    "set_default": "defaults",
    "assistant": "speculation.door",
    "stats": "speculation.stats",
    "hookimpl": "hookspecs",
    "plugins": "registry",
    "register": "registry",
    "unregister": "registry",
    "AssistantSpec": "specs",
    "CacheSpec": "specs",
    "KernelSpec": "specs",
    "KVQuantizerSpec": "specs",
    "StructureSpec": "specs",
    "SubcommandSpec": "specs",
    "TrainerSpec": "specs",
    "WeightQuantizerSpec": "specs",
    "WeightConfig": "weights.config",
    "quantize_weights": "weights.quantize",
    "describe": "weights.report",
    "WeightReport": "weights.report",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hfkv' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*_HOME, "__version__"])


if os.environ.get("HFKV_AUTOLOAD", "1") != "0":
    autoload.register()
