"""What the contracts run over: what is installed. Imports neither torch nor transformers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .. import registry
from ..specs import AssistantSpec, CacheSpec, KVQuantizerSpec, Spec, WeightQuantizerSpec, load

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

    from ..cache.cache import HFKVCache
    from ..cache.layer import KVLayer
    from ..cache.quantizer import KVQuantizer
    from ..weights import QuantizedLinear
    from ..weights.config import WeightConfig


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

        return make_cache(self.spec.name, model, **{**self.options_for(model), **options})

    def options_for(self, model: Any) -> dict[str, Any]:
        """The case's options, and those that this type of model needs."""
        return {**self.options, **self.spec.contract_model_options.get(model.config.model_type, {})}

    def reference(self, model: Any) -> Cache | None:
        """A cache for one forward that shows what the technique stands for; None where that is the plain model."""
        if self.spec.contract_reference is None:
            return None
        made: Cache = load(self.spec.contract_reference)(model, self.options)
        return made


@dataclass(frozen=True)
class QuantizerCase:
    """One KV quantizer of the matrix, at one of the widths that it declares.

    Attributes
    ----------
    spec
        The quantizer's record.
    nbits
        The width.
    """

    spec: KVQuantizerSpec
    nbits: int

    @property
    def label(self) -> str:
        """What it is called in test ids and messages."""
        return f"{self.spec.name}-{self.nbits}"

    def make(self) -> KVQuantizer:
        """The quantizer, as a cache gets it."""
        quantizer: KVQuantizer = registry.find(KVQuantizerSpec, self.spec.name, "backend")()
        return quantizer


@dataclass(frozen=True)
class WeightCase:
    """One weight quantizer of the matrix, with one of the settings that it declares.

    Attributes
    ----------
    spec
        The quantizer's record.
    options
        One of the spec's ``contract_options``.
    """

    spec: WeightQuantizerSpec
    options: Mapping[str, Any]

    @property
    def label(self) -> str:
        """What it is called in test ids and messages."""
        return ",".join([self.spec.name, *(f"{key}={value}" for key, value in self.options.items())])

    @property
    def layer_class(self) -> type[QuantizedLinear]:
        """The class that the spec loads."""
        loaded: type[QuantizedLinear] = self.spec.resolve()
        return loaded

    def config(self, **more: Any) -> WeightConfig:
        """The config of this setting, with more keywords."""
        from ..weights.config import WeightConfig

        return WeightConfig(self.spec.name, **{**self.options, **more})


@dataclass(frozen=True)
class WeightCases:
    """All of them, for a contract that is too costly to run for each.

    Attributes
    ----------
    cases
        Those whose requirements are met.
    """

    cases: tuple[WeightCase, ...]
    label: str = "all"


@dataclass(frozen=True)
class AssistantCase:
    """One assistant of the matrix."""

    spec: AssistantSpec

    @property
    def label(self) -> str:
        """What it is called in test ids and messages."""
        return self.spec.name

    def make(self, model: Any, **options: Any) -> dict[str, Any]:
        """Keywords for `generate`, with further options on top of the contract's.

        Raises
        ------
        NotImplementedError
            The assistant cannot work with such a model.
        """
        from ..speculation.door import assistant

        given = self.spec.contract_options
        if isinstance(given, str):
            given = load(given)(model)
        return assistant(self.spec.name, model, **{**given, **options})


# what contracts are written about
TESTED: tuple[type[Spec], ...] = (CacheSpec, KVQuantizerSpec, WeightQuantizerSpec, AssistantSpec)


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
        A plugin or cache that is not there, is broken, or provides nothing that there are contracts for.
    ImportError
        A requirement of a cache that was asked for is not installed.
    """
    manager = registry.manager()
    wanted = _wanted(plugins)
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


def select_quantizers(plugins: Iterable[str] = ()) -> list[QuantizerCase]:
    """The KV quantizers to test, by plugin (none means all), at each width that they declare; errors as in `select`."""
    manager = registry.manager()
    wanted = _wanted(plugins)
    specs = [spec for spec in manager.specs(KVQuantizerSpec).values() if manager.owner(spec) in wanted]
    if plugins:
        for spec in specs:
            manager.find(KVQuantizerSpec, spec.name, "backend")
    return [QuantizerCase(spec, nbits) for spec in specs for nbits in spec.nbits]


def select_weights(plugins: Iterable[str] = ()) -> list[WeightCase]:
    """The weight quantizers to test, by plugin (none means all), with each of their settings; errors as in `select`."""
    manager = registry.manager()
    wanted = _wanted(plugins)
    specs = [spec for spec in manager.specs(WeightQuantizerSpec).values() if manager.owner(spec) in wanted]
    if plugins:
        for spec in specs:
            manager.find(WeightQuantizerSpec, spec.name, "backend")
    return [WeightCase(spec, options) for spec in specs for options in spec.contract_options]


def select_assistants(plugins: Iterable[str] = ()) -> list[AssistantCase]:
    """The assistants to test, by plugin (none means all); errors as in `select`."""
    manager = registry.manager()
    wanted = _wanted(plugins)
    specs = [spec for spec in manager.specs(AssistantSpec).values() if manager.owner(spec) in wanted]
    if plugins:
        for spec in specs:
            manager.find(AssistantSpec, spec.name, "assistant")
    return [AssistantCase(spec) for spec in specs]


def _wanted(plugins: Iterable[str]) -> set[str]:
    """The plugins to test; all where none is named."""
    found = {plugin.name: plugin for plugin in registry.manager().plugins()}
    for name in plugins:
        if name not in found:
            choices = ", ".join(sorted(found)) or "none is installed"
            hint = registry.closest(name, found)
            raise ValueError(f"--hfkv-plugin {name!r} is not installed. Choose from: {choices}.{hint}")
        if found[name].error is not None:
            raise ValueError(f"--hfkv-plugin {name!r} is broken: {found[name].error}")
        if not any(isinstance(spec, TESTED) for spec in found[name].specs):
            raise ValueError(
                f"--hfkv-plugin {name!r} provides no cache, quantizer or assistant: there are contracts for these"
            )
    return set(plugins) or set(found)


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
