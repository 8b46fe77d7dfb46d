"""The registry of techniques, on pluggy: discover, isolate, attribute, explain."""

from __future__ import annotations

import difflib
import functools
import importlib.metadata
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

import pluggy
from packaging.requirements import InvalidRequirement, Requirement

from . import hookspecs, specs

GROUP = "hfkv"
SpecT = TypeVar("SpecT", bound=specs.Spec)

KINDS: Mapping[str, type[specs.Spec]] = {
    "hfkv_caches": specs.CacheSpec,
    "hfkv_kv_quantizers": specs.KVQuantizerSpec,
    "hfkv_weight_quantizers": specs.WeightQuantizerSpec,
    "hfkv_kernels": specs.KernelSpec,
    "hfkv_assistants": specs.AssistantSpec,
    "hfkv_trainers": specs.TrainerSpec,
    "hfkv_subcommands": specs.SubcommandSpec,
}

# names that generate already understands: a plugin that took one would change what other people's code does
RESERVED = frozenset(
    "dynamic offloaded quantized static offloaded_static sliding_window hybrid hybrid_chunked "
    "offloaded_hybrid offloaded_hybrid_chunked paged mamba".split()
)


@dataclass(frozen=True)
class Plugin:
    """One installed plugin, as ``hfkv list`` shows it.

    ``error`` is None for a plugin that works; ``specs`` holds every record that it yielded.
    """

    name: str
    distribution: str | None
    version: str | None
    error: str | None
    specs: tuple[specs.Spec, ...]


def unmet(spec: specs.Spec) -> list[str]:
    """The requirements of a spec that the installed distributions do not meet, each with what is there instead."""
    problems = []
    for text in spec.requires:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            problems.append(f"{text} (not a valid requirement)")
            continue
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            problems.append(f"{text} (not installed)")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            problems.append(f"{text} (found {version})")
    return problems


def closest(name: object, choices: Iterable[str]) -> str:
    """``" Did you mean 'x'?"`` for the nearest choice, or an empty string."""
    by_lower = {choice.lower(): choice for choice in choices}
    found = difflib.get_close_matches(str(name).lower(), by_lower, n=1, cutoff=0.6)
    return f" Did you mean {by_lower[found[0]]!r}?" if found else ""


class PluginManager:
    """pluggy with one broken plugin never taking the host down.

    Parameters
    ----------
    only
        Entry point names to load; None loads all.
    """

    def __init__(self, only: Iterable[str] | None = None) -> None:
        self._only = None if only is None else frozenset(only)
        self._pluggy = pluggy.PluginManager(GROUP)
        self._pluggy.add_hookspecs(hookspecs)
        self._specs: dict[type[specs.Spec], dict[str, specs.Spec]] = {kind: {} for kind in KINDS.values()}
        self._owner: dict[tuple[type[specs.Spec], str], str] = {}
        self._plugins: dict[str, Plugin] = {}
        self._registering = ""
        for hook, kind in KINDS.items():
            # called before any plugin is there: pluggy replays the call inside each register(), so `_registering`
            # names the plugin whose specs arrive
            getattr(self._pluggy.hook, hook).call_historic(functools.partial(self._receive, hook, kind))

    def trace(self) -> None:
        """Print every hook call to stderr."""
        self._pluggy.trace.root.setwriter(sys.stderr.write)
        self._pluggy.enable_tracing()

    def discover(self) -> None:
        """Load every entry point of the group ``hfkv``, each on its own."""
        for entry_point in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda e: e.name):
            if self._only is not None and entry_point.name not in self._only:
                continue
            distribution = entry_point.dist
            origin = (distribution.name, distribution.version) if distribution else (None, None)
            try:
                module = entry_point.load()
            # a plugin may fail in any way at import, SystemExit included; it is reported, not raised
            except (Exception, SystemExit) as error:
                self._record(entry_point.name, origin, error)
                continue
            self.register(module, entry_point.name, origin)

    def register(
        self, module: ModuleType | object, name: str, origin: tuple[str | None, str | None] = (None, None)
    ) -> Plugin:
        """Register one plugin; on any failure none of it stays registered.

        Returns the record, with ``error`` set where it failed.
        """
        if name in self._plugins:
            return self._record(f"{name} ({origin[0]})", origin, ValueError(f"the plugin name {name!r} is taken twice"))
        self._registering = name
        try:
            self._pluggy.register(module, name)
            self._check_hook_names()
        except (Exception, SystemExit) as error:
            if self._pluggy.has_plugin(name):
                self._pluggy.unregister(name=name)
            for kind, spec_name in [key for key, owner in self._owner.items() if owner == name]:
                del self._owner[kind, spec_name]
                del self._specs[kind][spec_name]
            return self._record(name, origin, error)
        finally:
            self._registering = ""
        return self._record(name, origin, None)

    def _record(self, name: str, origin: tuple[str | None, str | None], error: BaseException | None) -> Plugin:
        message = None if error is None else f"{type(error).__name__}: {error}"
        owned = tuple(self._specs[kind][spec] for (kind, spec), owner in self._owner.items() if owner == name)
        plugin = Plugin(name, *origin, message, owned)
        self._plugins[name] = plugin
        return plugin

    def _check_hook_names(self) -> None:
        try:
            self._pluggy.check_pending()
        except pluggy.PluginValidationError as error:
            unknown = str(error).partition("unknown hook '")[2].partition("'")[0]
            raise ValueError(f"unknown hook {unknown!r}.{closest(unknown, KINDS)}") from error

    def _receive(self, hook: str, kind: type[specs.Spec], result: object) -> None:
        owner = self._registering
        if not isinstance(result, Iterable):
            raise TypeError(f"{hook} of plugin {owner!r} must yield {kind.__name__} records, got {result!r}")
        for spec in result:
            if type(spec) is not kind:
                raise TypeError(f"{hook} of plugin {owner!r} must yield {kind.__name__} records, got {spec!r}")
            if kind is specs.CacheSpec and spec.name in RESERVED:
                raise ValueError(f"{spec.name!r} is a cache of transformers itself; plugin {owner!r} needs another name")
            other = self._owner.get((kind, spec.name))
            if other is not None:
                raise ValueError(
                    f"{kind.__name__} {spec.name!r} of plugin {owner!r} is already provided by plugin "
                    f"{other!r}; uninstall one, or name the other in HFKV_PLUGINS"
                )
            self._specs[kind][spec.name] = spec
            self._owner[kind, spec.name] = owner

    def plugins(self) -> list[Plugin]:
        """Every plugin that was found, broken ones included."""
        return list(self._plugins.values())

    def specs(self, kind: type[SpecT]) -> dict[str, SpecT]:
        """The registered specs of one kind, by name."""
        return dict(self._specs[kind])  # type: ignore[arg-type]

    def owner(self, spec: specs.Spec) -> str:
        """The name of the plugin that yielded a spec."""
        return self._owner[type(spec), spec.name]

    def find(self, kind: type[SpecT], name: object, option: str) -> SpecT:
        """The spec of that name whose requirements are met.

        Parameters
        ----------
        option
            What the user wrote it in, for the message.

        Raises
        ------
        ValueError
            No plugin provides the name; the message lists the choices and the closest one.
        ImportError
            The plugin is there, but what it needs is not.
        """
        known = self._specs[kind]
        spec = known.get(name) if isinstance(name, str) else None
        if spec is None:
            choices = ", ".join(sorted(known)) or "none: no installed plugin provides any"
            raise ValueError(f"{option}={name!r} is not known. Choose from: {choices}.{closest(name, known)}")
        problems = unmet(spec)
        if problems:
            fix = " ".join(f"'{text}'" for text in spec.requires)
            raise ImportError(f"{option}={name!r} needs {'; '.join(problems)}. Fix: pip install {fix}")
        return spec  # type: ignore[return-value]


@functools.cache
def manager() -> PluginManager:
    """The manager of this process; discovers on first use. ``HFKV_PLUGINS`` limits it, ``HFKV_TRACE=1`` traces it."""
    limit = os.environ.get("HFKV_PLUGINS")
    result = PluginManager(None if limit is None else [name.strip() for name in limit.split(",") if name.strip()])
    if os.environ.get("HFKV_TRACE", "0") not in ("", "0"):
        result.trace()
    result.discover()
    return result


def find(kind: type[SpecT], name: object, option: str) -> Any:
    """Import and return what the spec of that name loads; errors as `PluginManager.find`."""
    return manager().find(kind, name, option).resolve()


def plugins() -> list[Plugin]:
    """Every installed plugin with what it provides, and the error of each that is broken."""
    return manager().plugins()


def register(plugin: ModuleType | object, name: str) -> None:
    """Register a plugin of this process (a module or an object with hook implementations), without an entry point.

    Raises
    ------
    ValueError
        The plugin is broken; nothing of it stays registered.
    """
    record = manager().register(plugin, name)
    if record.error is not None:
        raise ValueError(f"plugin {name!r}: {record.error}")
    if "hfkv.integration" in sys.modules:
        from . import integration

        integration.refresh_names()
