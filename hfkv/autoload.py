"""Activation without an import: PyTorch calls `register` at the end of ``import torch``.

Nothing here imports torch, transformers or a plugin. Two modules of transformers are watched, and `integration`
patches each once it is loaded; ``HFKV_AUTOLOAD=0`` switches it off until `activate` is called.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import os
import sys
from collections.abc import Sequence
from types import ModuleType

# the module to watch, and the function of `integration` that patches it
WATCHED = {
    "transformers.generation.configuration_utils": "add_names",
    "transformers.generation.utils": "wrap_generation",
}

_logger = logging.getLogger("hfkv")
_state = {"finder": None, "off": False}  # type: dict[str, _Finder | bool | None]


def _patch(name: str, module: ModuleType) -> None:
    try:
        from . import integration

        getattr(integration, WATCHED[name])(module)
    # an exception here would break `import transformers` for everyone
    except Exception as error:
        _logger.warning("hfkv could not activate in %s: %s: %s", name, type(error).__name__, error, exc_info=True)


class _Loader(importlib.abc.Loader):
    """A module's own loader, followed by the patch."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # what runs next must see the module as if we had not been there
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        _patch(module.__name__, module)


class _Finder(importlib.abc.MetaPathFinder):
    """Wraps the loaders of the watched modules; finds nothing itself."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in WATCHED:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


def register() -> None:
    """Activate unless ``HFKV_AUTOLOAD=0``; never raises. The entry point of the group ``torch.backends``."""
    if os.environ.get("HFKV_AUTOLOAD", "1") != "0" and not _state["off"]:
        activate()


def activate() -> None:
    """Let ``cache_implementation`` take the names of installed plugins. May be called any number of times."""
    _state["off"] = False
    if _state["finder"] is not None:
        return
    finder = _Finder()
    _state["finder"] = finder
    sys.meta_path.insert(0, finder)
    for name in WATCHED:
        module = sys.modules.get(name)
        # a module that is being imported right now gets its patch when it is used: see integration.wrap_generation
        if module is not None and not getattr(module.__spec__, "_initializing", False):
            _patch(name, module)


def deactivate() -> None:
    """Undo `activate`: transformers is as it was, and stays so until `activate` is called."""
    _state["off"] = True
    finder = _state["finder"]
    if finder is None:
        return
    _state["finder"] = None
    sys.meta_path.remove(finder)  # type: ignore[arg-type]
    if "hfkv.integration" in sys.modules:
        from . import integration

        integration.restore()


def is_active() -> bool:
    """Whether transformers is patched, or will be when it is imported."""
    return _state["finder"] is not None
