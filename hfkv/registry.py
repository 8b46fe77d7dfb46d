"""The registry of techniques, on pluggy: discover, isolate, attribute, explain."""

from __future__ import annotations

import difflib
import functools
import importlib.metadata
import os
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

import pluggy

from . import hookspecs, specs
from .requirements import invalid
from .requirements import unmet as unmet
from .specs import Spec

GROUP = "hfkv"
SpecT = TypeVar("SpecT", bound=Spec)

KINDS: Mapping[str, type[Spec]] = {
    "hfkv_caches": specs.CacheSpec,
    "hfkv_kv_quantizers": specs.KVQuantizerSpec,
    "hfkv_weight_quantizers": specs.WeightQuantizerSpec,
    "hfkv_kernels": specs.KernelSpec,
    "hfkv_assistants": specs.AssistantSpec,
    "hfkv_trainers": specs.TrainerSpec,
    "hfkv_structures": specs.StructureSpec,
    "hfkv_subcommands": specs.SubcommandSpec,
}

# names that mean something already: a plugin that took one would change what other people's code does
RESERVED: Mapping[type[Spec], frozenset[str]] = {
    specs.CacheSpec: frozenset(
        "dynamic offloaded quantized static offloaded_static sliding_window hybrid hybrid_chunked "
        "offloaded_hybrid offloaded_hybrid_chunked paged mamba".split()
    ),
    specs.KernelSpec: frozenset({"reference"}),
}


@dataclass(frozen=True)
class Plugin:
    """One installed plugin, as ``hfkv list`` shows it.

    ``error`` is None for a plugin that works; ``specs`` holds every record that it yielded.
    """

    name: str
    distribution: str | None
    version: str | None
    error: str | None
    specs: tuple[Spec, ...]


def check_options(
    given: Iterable[str],
    fields: Sequence[str],
    option: str,
    owner: str,
    *,
    also: Sequence[str] = (),
    hints: Iterable[str] = (),
) -> None:
    """Refuse a user's option that is no field.

    Parameters
    ----------
    option, owner
        What the message calls an option, and what does not know it.
    also
        Names that are valid beside the fields, read elsewhere.
    hints
        Further names that a misspelt one may have meant.

    Raises
    ------
    ValueError
        An unknown option; the message lists the valid ones and the closest.
    """
    for key in given:
        if key not in fields:
            raise ValueError(
                f"{option} {key!r} is not known to {owner}. Valid options: {', '.join([*fields, *also])}."
                f"{closest(key, [*fields, *hints, *also])}"
            )


def closest(name: object, choices: Iterable[str]) -> str:
    """``" Did you mean 'x'?"`` for the nearest choice, or an empty string."""
    by_lower = {choice.lower(): choice for choice in choices}
    found = difflib.get_close_matches(str(name).lower(), by_lower, n=1, cutoff=0.6)
    return f" Did you mean {by_lower[found[0]]!r}?" if found else ""


def _check_fields(spec: Spec) -> None:
    """Raise ValueError for a record that could not be used later."""
    kind = type(spec).__name__
    if not isinstance(spec.name, str) or not spec.name or spec.name != spec.name.strip().lower():
        raise ValueError(f"{kind} name={spec.name!r} must be a lower-case string")
    for name in ("load", "change") if isinstance(spec, specs.StructureSpec) else ("load",):
        place = getattr(spec, name)
        module, _, attribute = place.partition(":") if isinstance(place, str) else ("", "", "")
        if not module or not attribute:
            raise ValueError(f"{kind} {spec.name!r}: {name}={place!r} must be 'module:attribute'")
    problem = invalid(spec)
    if problem is not None:
        raise ValueError(f"{kind} {spec.name!r}: {problem}")


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
        self._specs: dict[type[Spec], dict[str, Spec]] = {kind: {} for kind in KINDS.values()}
        self._owner: dict[tuple[type[Spec], str], str] = {}
        self._plugins: dict[str, Plugin] = {}
        self._registering = ""
        self._answered: set[str] = set()
        self._tracing = False
        for hook, kind in KINDS.items():
            # called before any plugin is there: pluggy replays the call inside each register(), so `_registering`
            # names the plugin whose specs arrive
            getattr(self._pluggy.hook, hook).call_historic(functools.partial(self._receive, hook, kind))

    def trace(self) -> None:
        """Print every plugin, hook call and record to stderr, and the traceback of a plugin that is broken."""
        self._tracing = True
        self._pluggy.trace.root.setwriter(sys.stderr.write)
        self._pluggy.enable_tracing()

    def discover(self) -> None:
        """Load every entry point of the group ``hfkv``, each on its own."""
        entry_points = sorted(importlib.metadata.entry_points(group=GROUP), key=lambda e: e.name)
        for entry_point in entry_points:
            if self._only is not None and entry_point.name not in self._only:
                continue
            distribution = entry_point.dist
            origin = (distribution.name, distribution.version) if distribution else (None, None)
            try:
                module = entry_point.load()
            except KeyboardInterrupt:
                raise
            # a plugin may fail in any way at import: SystemExit, and a panic of a Rust extension, are no Exception
            except BaseException as error:
                self._record(entry_point.name, origin, error)
                continue
            self.register(module, entry_point.name, origin)
        installed = {entry_point.name for entry_point in entry_points}
        for name in sorted((self._only or frozenset()) - installed):
            missing = ValueError(f"HFKV_PLUGINS names it, but it is not installed.{closest(name, installed)}")
            self._record(name, (None, None), missing)

    def register(
        self, module: ModuleType | object, name: str, origin: tuple[str | None, str | None] = (None, None)
    ) -> Plugin:
        """Register one plugin; on any failure none of it stays registered.

        Returns the record, with ``error`` set where it failed.
        """
        if name in self._plugins:
            return self._record(f"{name} ({origin[0]})", origin, ValueError(f"the plugin name {name!r} is taken twice"))
        outer = self._registering, self._answered
        self._registering, self._answered = name, set()
        self._trace(f"plugin {name!r}")
        try:
            self._check_marked(module)
            self._pluggy.register(module, name)
            self._check_hooks(module)
        except KeyboardInterrupt:
            self._forget(name)
            raise
        except BaseException as error:
            self._forget(name)
            return self._record(name, origin, error)
        finally:
            self._registering, self._answered = outer
        return self._record(name, origin, None)

    def unregister(self, name: str) -> None:
        """Forget a plugin and all that it provides; nothing happens where there is none of that name."""
        self._forget(name)
        self._plugins.pop(name, None)

    def _forget(self, name: str) -> None:
        """Take out what a plugin registered; pluggy leaves a plugin that failed half registered."""
        if self._pluggy.has_plugin(name):
            self._pluggy.unregister(name=name)
        for kind, spec_name in [key for key, owner in self._owner.items() if owner == name]:
            del self._owner[kind, spec_name]
            del self._specs[kind][spec_name]

    def _trace(self, text: str) -> None:
        if self._tracing:
            sys.stderr.write(f"hfkv: {text}\n")

    def _record(self, name: str, origin: tuple[str | None, str | None], error: BaseException | None) -> Plugin:
        message = None if error is None else f"{type(error).__name__}: {error}"
        owned = tuple(self._specs[kind][spec] for (kind, spec), owner in self._owner.items() if owner == name)
        plugin = Plugin(name, *origin, message, owned)
        self._plugins[name] = plugin
        if error is not None:
            self._trace(f"plugin {name!r} is broken\n{''.join(traceback.format_exception(error))}")
        return plugin

    def _check_marked(self, module: object) -> None:
        for hook in KINDS:
            if hasattr(module, hook) and self._pluggy.parse_hookimpl_opts(module, hook) is None:
                raise ValueError(f"{hook} is not marked as a hook: write @hfkv.hookimpl above it")

    def _check_hooks(self, module: object) -> None:
        try:
            self._pluggy.check_pending()
        except pluggy.PluginValidationError as error:
            unknown = str(error).partition("unknown hook '")[2].partition("'")[0]
            raise ValueError(f"unknown hook {unknown!r}.{closest(unknown, KINDS)}") from error
        implemented = {caller.name for caller in self._pluggy.get_hookcallers(module) or ()}
        if not implemented:
            raise ValueError(f"{module!r} implements no hook; there are {', '.join(KINDS)}")
        # pluggy passes on no None: what a hook gives that forgot its yield
        for hook in sorted(implemented - self._answered):
            raise TypeError(f"{hook} returns None: it must yield {KINDS[hook].__name__} records")

    def _receive(self, hook: str, kind: type[Spec], result: object) -> None:
        owner = self._registering
        self._answered.add(hook)
        if not isinstance(result, Iterable):
            raise TypeError(f"{hook} of plugin {owner!r} must yield {kind.__name__} records, got {result!r}")
        for spec in result:
            if type(spec) is not kind:
                raise TypeError(f"{hook} of plugin {owner!r} must yield {kind.__name__} records, got {spec!r}")
            _check_fields(spec)
            if spec.name in RESERVED.get(kind, ()):
                raise ValueError(f"{kind.__name__} name {spec.name!r} is built in; plugin {owner!r} needs another name")
            other = self._owner.get((kind, spec.name))
            if other is not None:
                raise ValueError(
                    f"{kind.__name__} {spec.name!r} of plugin {owner!r} is already provided by plugin "
                    f"{other!r}; uninstall one, or name the other in HFKV_PLUGINS"
                )
            self._trace(f"{kind.__name__} {spec.name!r}")
            self._specs[kind][spec.name] = spec
            self._owner[kind, spec.name] = owner

    def plugins(self) -> list[Plugin]:
        """Every plugin that was found, broken ones included."""
        return list(self._plugins.values())

    def specs(self, kind: type[SpecT]) -> dict[str, SpecT]:
        """The registered specs of one kind, by name."""
        return dict(self._specs[kind])  # type: ignore[arg-type]

    def owner(self, spec: Spec) -> str:
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
            broken = ", ".join(plugin.name for plugin in self._plugins.values() if plugin.error is not None)
            raise ValueError(
                f"{option}={name!r} is not known. Choose from: {choices}.{closest(name, known)}"
                + (f" Broken plugins, which `hfkv list` explains: {broken}." if broken else "")
            )
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

    Its names can be used at once. Registering again under the same name replaces what was registered before, so that
    a notebook's cell can be run twice.

    Raises
    ------
    ValueError
        The plugin is broken; nothing of it stays registered. Or an installed plugin has that name.
    """
    unregister(name)
    record = manager().register(plugin, name)
    if record.error is not None:
        manager().unregister(name)
        raise ValueError(f"plugin {name!r}: {record.error}")
    _tell_those_who_asked()


def unregister(name: str) -> None:
    """Undo `register`; nothing happens where no plugin has that name.

    Raises
    ------
    ValueError
        The plugin of that name is an installed one.
    """
    installed = next((known for known in plugins() if known.name == name and known.distribution is not None), None)
    if installed is not None:
        raise ValueError(
            f"the plugin name {name!r} belongs to the installed distribution {installed.distribution!r}: "
            "choose another name, or leave it out with HFKV_PLUGINS"
        )
    manager().unregister(name)
    _tell_those_who_asked()


def _tell_those_who_asked() -> None:
    """Bring what was resolved once up to date, where it was."""
    if "hfkv.integration" in sys.modules:
        from . import integration

        integration.refresh_names()
    if "hfkv.kernels" in sys.modules:
        from . import kernels

        kernels.forget_choices()
