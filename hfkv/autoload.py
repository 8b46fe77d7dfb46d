"""Activation without an import: PyTorch calls `register` at the end of ``import torch``.

Nothing here imports torch, transformers or a plugin. Some modules of transformers are watched, and `integration`
patches each once it is loaded; ``HFKV_AUTOLOAD=0`` switches it off until `activate` is called.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# the module to watch, and the function of `integration` that patches it
WATCHED = {
    "transformers.modeling_utils": "wrap_models",
    "transformers.generation.configuration_utils": "add_names",
    "transformers.generation.utils": "wrap_generation",
    "transformers.models.diffusion_gemma.generation_diffusion_gemma": "keep_names_out",
    "transformers.quantizers.auto": "add_weight_quantizer",
}

_logger = logging.getLogger("hfkv")


def register() -> None:
    """Activate unless ``HFKV_AUTOLOAD=0``; never raises. The entry point of the group ``torch.backends``."""
    if os.environ.get("HFKV_AUTOLOAD", "1") == "0" or _state.off:
        return
    try:
        activate()
    # an exception here would break `import torch` for everyone
    except Exception as error:
        _logger.warning("hfkv is not active: %s: %s", type(error).__name__, error)


def activate() -> None:
    """Let ``cache_implementation`` take the names of installed plugins. May be called any number of times.

    Raises
    ------
    AttributeError
        This release of transformers has not what hfkv patches; nothing stays patched.
    """
    _state.off = False
    if _state.finder is not None:
        return
    _state.finder = _Finder()
    sys.meta_path.insert(0, _state.finder)
    try:
        for name in WATCHED:
            module = sys.modules.get(name)
            if module is not None:
                _patch_when_loaded(name, module)
    except Exception:
        _withdraw()
        raise


def deactivate() -> None:
    """Undo `activate`: transformers is as it was, and stays so until `activate` is called."""
    _state.off = True
    _withdraw()


def is_active() -> bool:
    """Whether transformers is patched, or will be when it is imported."""
    return _state.finder is not None


class _State:
    """What this process has done: the finder that is installed, and whether a user switched hfkv off."""

    finder: _Finder | None = None
    off = False


_state = _State()


def _withdraw() -> None:
    if _state.finder is not None:
        sys.meta_path.remove(_state.finder)
        _state.finder = None
    if "hfkv.integration" in sys.modules:
        from . import integration

        integration.restore()


def _patch(name: str, module: ModuleType) -> None:
    from . import integration

    getattr(integration, WATCHED[name])(module)


def _patch_or_withdraw(name: str, module: ModuleType) -> None:
    """Patch a module at the end of its import, which must not fail because of us."""
    if not is_active():
        return
    try:
        _patch(name, module)
    except Exception as error:
        # all or nothing: a name that is accepted, but whose cache nobody builds, would be ignored in silence
        _withdraw()
        _logger.warning("hfkv is not active, %s could not be patched: %s: %s", name, type(error).__name__, error)


def _patch_when_loaded(name: str, module: ModuleType) -> None:
    spec: Any = module.__spec__
    if type(spec) in (ModuleSpec, _RunningSpec) and getattr(spec, "_initializing", False):
        # transformers came first and is importing torch, which called us: this module's import is still running
        spec.__class__ = _RunningSpec
        # another thread may have ended the import in the meantime
        if spec._initializing:
            return
        spec.__class__ = ModuleSpec
    _patch(name, module)


class _RunningSpec(ModuleSpec):
    """The spec of a module whose import is running: patches the module when the import system marks the end."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            self.__class__ = ModuleSpec  # type: ignore[assignment]
            module = sys.modules.get(self.name)
            # an import that failed leaves no module
            if module is not None:
                _patch_or_withdraw(self.name, module)


class _Finder:
    """Wraps the loaders of the watched modules; finds nothing itself."""

    def __init__(self) -> None:
        self._asking = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # another finder that asks all finders, as this one does, would ask us again and again
        if fullname not in WATCHED or getattr(self._asking, "now", False):
            return None
        self._asking.now = True
        try:
            spec = self._ask_others(fullname, path, target)
        finally:
            self._asking.now = False
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
        return spec

    def _ask_others(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in sys.meta_path:
            find_spec = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find_spec is None else find_spec(fullname, path, target)
            if spec is not None:
                return spec
        return None


class _Loader:
    """A module's own loader, followed by the patch."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        # who looks at the spec without importing the module asks for its source, its file, its resources
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        # what runs next must see the module as if we had not been there
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        _patch_or_withdraw(module.__name__, module)
