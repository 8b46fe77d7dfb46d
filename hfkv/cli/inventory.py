"""What is installed, from metadata alone: nothing that a spec names is imported."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

from .. import __version__, registry
from ..specs import (
    AssistantSpec,
    CacheSpec,
    KernelSpec,
    KVQuantizerSpec,
    Spec,
    StructureSpec,
    SubcommandSpec,
    TrainerSpec,
    WeightQuantizerSpec,
)
from .app import OWN

# what a kind is called in the output, in the order in which it is shown
KINDS: dict[type[Spec], str] = {
    CacheSpec: "cache",
    KVQuantizerSpec: "KV quantizer",
    WeightQuantizerSpec: "weight quantizer",
    KernelSpec: "kernel",
    AssistantSpec: "assistant",
    TrainerSpec: "trainer",
    StructureSpec: "structure",
    SubcommandSpec: "subcommand",
}

# what core itself brings
CORE = registry.Plugin(
    name="core",
    distribution="hfkv",
    version=__version__,
    error=None,
    specs=(
        KernelSpec(
            name="reference",
            summary="plain torch, any device; what runs without the others",
            load="hfkv.kernels.reference:ReferenceKernels",
            priority=0,
        ),
        *OWN.values(),
    ),
)


def inventory() -> dict[str, Any]:
    """Versions, autoload, and every plugin with what it provides, as plain data.

    A ``status`` is ``"ok"``, ``"missing"`` (a requirement is not installed; ``problems`` and ``fix`` say which and
    how) or ``"broken"`` (a fault of the plugin's; ``error`` and ``problems`` say which).
    """
    active, reason = autoload()
    return {
        "versions": {
            "hfkv": __version__,
            "transformers": _version("transformers"),
            "torch": _version("torch"),
            "python": platform.python_version(),
        },
        "autoload": {"active": active, "reason": reason},
        "plugins": [_plugin(plugin) for plugin in (CORE, *registry.plugins())],
    }


def broken(found: dict[str, Any]) -> bool:
    """Whether a plugin is broken, or something that one provides; a missing requirement is not a fault."""
    return any(item["status"] == "broken" for plugin in found["plugins"] for item in (plugin, *plugin["specs"]))


def autoload() -> tuple[bool, str]:
    """Whether ``import torch`` activates hfkv in this environment, and why (not)."""
    if os.environ.get("HFKV_AUTOLOAD", "1") == "0":
        return False, "HFKV_AUTOLOAD=0; `import hfkv` and hfkv.activate() still activate it"
    # PyTorch reads this variable so
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return False, "TORCH_DEVICE_BACKEND_AUTOLOAD keeps PyTorch from calling it; `import hfkv` activates it"
    entry_points = importlib.metadata.entry_points(group="torch.backends", name="hfkv")
    if not any(entry_point.value == "hfkv.autoload:register" for entry_point in entry_points):
        return False, "the entry point of the group torch.backends is not installed; fix: pip install hfkv"
    return True, "generate takes the caches' names, with no import of hfkv"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _plugin(plugin: registry.Plugin) -> dict[str, Any]:
    return {
        "name": plugin.name,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "status": "ok" if plugin.error is None else "broken",
        "error": plugin.error,
        "specs": [_spec(spec) for spec in plugin.specs],
    }


def _spec(spec: Spec) -> dict[str, Any]:
    status, problems, fix = "ok", registry.unmet(spec), None
    if problems:
        status, fix = "missing", "pip install " + " ".join(f"'{text}'" for text in spec.requires)
    if isinstance(spec, SubcommandSpec) and OWN.get(spec.name, spec) is not spec:
        status, problems, fix = "broken", [f"hfkv has a subcommand {spec.name!r} of its own"], None
    return {
        "kind": KINDS[type(spec)],
        "name": spec.name,
        "summary": spec.summary,
        "status": status,
        "problems": problems,
        "fix": fix,
    }
