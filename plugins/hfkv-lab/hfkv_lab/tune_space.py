"""What ``hfkv tune`` chooses from, and how many bytes each choice takes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from hfkv import registry
from hfkv.cache import KVLayer, StateShape
from hfkv.cache.build import build_cache
from hfkv.cli.settings import Setting
from hfkv.specs import CacheSpec

from .plan_model import layer_shapes

# what a technique must let us set, for the keys and for the values
PER_LAYER = ("key_nbits", "value_nbits", "group_size")
WIDTHS = (2, 3, 4, 8)


@dataclass(frozen=True)
class LayerChoice:
    """The settings of one layer."""

    key_nbits: int
    value_nbits: int
    group_size: int


@dataclass(frozen=True)
class Shared:
    """The settings that all layers share."""

    residual_length: int
    sink_length: int
    backend: str


@dataclass(frozen=True)
class Space:
    """Everything that may be chosen; the first of each is where measuring starts.

    Attributes
    ----------
    cache
        The technique, with the options that are not tuned.
    """

    cache: Setting
    group_sizes: Sequence[int] = (32, 64, 128)
    residual_lengths: Sequence[int] = (128, 64, 32)
    sink_lengths: Sequence[int] = (4,)
    backends: Sequence[str] = ("rtn",)

    def check(self) -> None:
        """Raise ValueError where the technique has no such options, or does not take one of the values."""
        options = registry.find(CacheSpec, self.cache.name, "--cache").Options
        fields = {field.name for field in dataclasses.fields(options)}
        tuned = {*PER_LAYER, *(field.name for field in dataclasses.fields(Shared))}
        if tuned - fields:
            raise ValueError(
                f"--cache {self.cache.name} cannot be tuned: it has no option {', '.join(sorted(tuned - fields))}. "
                "Fix: --cache kivi"
            )
        clash = sorted({*self.cache.options} & {*tuned, "nbits", "layers"})
        if clash:
            raise ValueError(
                f"--cache {self.cache.label}: {', '.join(clash)} is what tune chooses. Fix: leave it out, or narrow "
                "the choice with --group-size, --residual-length, --sink-length and --backend"
            )
        for shared, choice in itertools.product(self.shared(), self.layer_choices()):
            options.parse(self.options(shared, choice), self.cache.name)

    def shared(self) -> Iterator[Shared]:
        """Every combination of what the layers share."""
        for values in itertools.product(self.residual_lengths, self.sink_lengths, self.backends):
            yield Shared(*values)

    @property
    def start(self) -> Shared:
        """Where measuring starts."""
        return next(self.shared())

    def layer_choices(self) -> Iterator[LayerChoice]:
        """Every setting of one layer."""
        for group_size, key_nbits, value_nbits in itertools.product(self.group_sizes, WIDTHS, WIDTHS):
            yield LayerChoice(key_nbits, value_nbits, group_size)

    def options(self, shared: Shared, everywhere: LayerChoice) -> dict[str, Any]:
        """The ``cache_config`` with one setting for all layers."""
        return {**self.cache.options, **dataclasses.asdict(shared), **dataclasses.asdict(everywhere)}


def eligible(config: PretrainedConfig, cache: Setting) -> list[int]:
    """The layers that the technique takes, and that store anything."""
    layers = build_cache(cache.name, config, cache.options).layers
    shapes = layer_shapes(config)
    return [index for index, layer in enumerate(layers) if isinstance(layer, KVLayer) and shapes[index].elements]


class Sizes:
    """Bytes of each layer under each setting, at one context, for one user."""

    def __init__(self, config: PretrainedConfig, space: Space, context: int, itemsize: int) -> None:
        self._config, self._space, self._context = config, space, context
        self._shapes = [
            StateShape(1, shape.kv_heads, shape.key_dim, shape.value_dim, itemsize) for shape in layer_shapes(config)
        ]
        self._known: dict[tuple[Shared, LayerChoice], dict[int, int]] = {}
        self.layers = eligible(config, space.cache)
        self.elements = context * sum(layer_shapes(config)[index].elements for index in self.layers)

    def of(self, shared: Shared, choice: LayerChoice, index: int) -> int:
        """Bytes of a layer."""
        known = self._known.get((shared, choice))
        if known is None:
            known = self._planned(Setting(self._space.cache.name, self._space.options(shared, choice)))
            self._known[shared, choice] = known
        return known[index]

    def _planned(self, setting: Setting) -> dict[int, int]:
        layers = build_cache(setting.name, self._config, setting.options).layers
        return {
            index: layer.planned_bytes(self._context, self._shapes[index])
            for index, layer in enumerate(layers)
            if isinstance(layer, KVLayer)
        }

    def of_cache(self, setting: Setting) -> tuple[int, float] | None:
        """Bytes and bits per element of the same layers in any cache of a plugin; None where it leaves one out."""
        known = self._planned(setting)
        if not {*self.layers} <= {*known}:
            return None
        total = sum(known[index] for index in self.layers)
        return total, 8 * total / self.elements

    def total(self, shared: Shared, choices: Mapping[int, LayerChoice]) -> int:
        """Bytes of all tuned layers."""
        return sum(self.of(shared, choice, index) for index, choice in choices.items())

    def bits(self, shared: Shared, choices: Mapping[int, LayerChoice]) -> float:
        """Bits per element of all tuned layers."""
        return 8 * self.total(shared, choices) / self.elements


def cache_config(space: Space, shared: Shared, choices: Mapping[int, LayerChoice]) -> dict[str, Any]:
    """The ``cache_config`` for `generate`: the most frequent setting, and what other layers have in its place."""
    counts: dict[LayerChoice, int] = {}
    for choice in choices.values():
        counts[choice] = counts.get(choice, 0) + 1
    usual = max(counts, key=lambda choice: counts[choice])
    result = space.options(shared, usual)
    layers: dict[str, dict[str, int]] = {}
    for first, last, choice in _runs(choices):
        own = dataclasses.asdict(choice)
        different = {name: value for name, value in own.items() if value != getattr(usual, name)}
        if different:
            layers[f"{first}" if first == last else f"{first}-{last}"] = different
    return {**result, "layers": layers} if layers else result


def _runs(choices: Mapping[int, LayerChoice]) -> Iterator[tuple[int, int, LayerChoice]]:
    """Neighbours of one setting, as first, last and the setting."""
    indices = sorted(choices)
    begin = 0
    for position, index in enumerate(indices):
        end = position + 1
        if end == len(indices) or choices[indices[end]] != choices[index] or indices[end] != index + 1:
            yield indices[begin], index, choices[index]
            begin = end
