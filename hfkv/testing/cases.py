"""What the contracts run over: one installed cache with its options. Imports neither torch nor transformers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .. import registry
from ..specs import CacheSpec

if TYPE_CHECKING:
    from ..cache.cache import HFKVCache
    from ..cache.layer import KVLayer


@dataclass(frozen=True)
class CacheCase:
    """One cache of the matrix.

    Attributes
    ----------
    spec
        The cache's record.
    plugin
        The plugin that provides it.
    options
        What it is built with: the spec's ``contract_options``, and what ``--hfkv-cache`` adds.
    label
        What it is called in test ids and messages.
    """

    spec: CacheSpec
    plugin: str
    options: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""

    def __str__(self) -> str:
        options = ", ".join(f"{key}={value!r}" for key, value in self.options.items())
        return f"{self.spec.name}({options})"

    @property
    def layer_class(self) -> type[KVLayer]:
        """The class that the spec loads."""
        loaded: type[KVLayer] = self.spec.resolve()
        return loaded

    def make(self, model: Any, **options: Any) -> HFKVCache:
        """An empty cache for a model, with further options on top of the case's own."""
        from ..cache.build import make_cache

        return make_cache(self.spec.name, model, **{**self.options, **options})


def select(plugins: Iterable[str] = (), caches: Iterable[str] = ()) -> list[CacheCase]:
    """The caches to test, by plugin and name.

    Parameters
    ----------
    plugins
        Names of plugins, as ``hfkv list`` shows them; none means all.
    caches
        ``NAME`` or ``NAME:option=value,...``; none means every cache of the plugins, with its contract options.

    Raises
    ------
    ValueError
        A plugin or cache that is not there, is broken, or provides no cache.
    """
    manager = registry.manager()
    found = {plugin.name: plugin for plugin in manager.plugins()}
    for name in plugins:
        if name not in found:
            choices = ", ".join(sorted(found)) or "none is installed"
            hint = registry.closest(name, found)
            raise ValueError(f"--hfkv-plugin {name!r} is not installed. Choose from: {choices}.{hint}")
        if found[name].error is not None:
            raise ValueError(f"--hfkv-plugin {name!r} is broken: {found[name].error}")
        if not any(isinstance(spec, CacheSpec) for spec in found[name].specs):
            raise ValueError(f"--hfkv-plugin {name!r} provides no cache, and the contracts are about caches")
    wanted = set(plugins) or set(found)
    cases = [
        CacheCase(spec, manager.owner(spec), dict(spec.contract_options), spec.name)
        for spec in manager.specs(CacheSpec).values()
        if manager.owner(spec) in wanted
    ]
    if caches:
        cases = [_named(text, {case.spec.name: case for case in cases}) for text in caches]
    if plugins or caches:
        # who asks for a cache by name wants it tested, not skipped
        for case in cases:
            manager.find(CacheSpec, case.spec.name, "cache")
    return cases


def _named(text: str, cases: Mapping[str, CacheCase]) -> CacheCase:
    name, _, options = text.partition(":")
    if name not in cases:
        choices = ", ".join(sorted(cases)) or "none"
        raise ValueError(f"--hfkv-cache {name!r} is not known. Choose from: {choices}.{registry.closest(name, cases)}")
    case = cases[name]
    given = dict(_option(part, text) for part in options.split(",") if part)
    return CacheCase(case.spec, case.plugin, {**case.options, **given}, text)


def _option(part: str, text: str) -> tuple[str, Any]:
    key, separator, value = part.partition("=")
    if not separator:
        raise ValueError(f"--hfkv-cache {text!r}: write options as NAME:option=value,option=value")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value
