"""Which layers of a model a config names, and what each becomes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from .. import registry
from ..layer_range import layer_indices
from .config import KEEP, WeightConfig
from .linear import QuantizedLinear


@dataclass(frozen=True)
class Plan:
    """What a config does with a model.

    Attributes
    ----------
    targets
        The class and the options of each layer to quantize, by the layer's name.
    skip
        The names of the linear layers that stay, in the order of the model.
    tied
        The targets whose weight is another module's too (an output head that is to be split off).
    """

    targets: Mapping[str, tuple[type[QuantizedLinear], Any]]
    skip: tuple[str, ...]
    tied: frozenset[str]

    @property
    def whole_model(self) -> bool:
        """Whether a backend looks at the whole model, which has to be loaded before any layer is quantized."""
        return any(layer_class.whole_model for layer_class, _ in self.targets.values())


def plan(model: PreTrainedModel, config: WeightConfig) -> Plan:
    """Apply a config's rules to a model, which may be on the meta device.

    Raises
    ------
    NotImplementedError
        The model has no linear layer that could be quantized.
    ValueError
        An entry of ``skip`` or ``layers`` names nothing.
    """
    linear = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    tied = tied_modules(model)
    skipped = _skipped(linear, config.skip, model, tied)
    overrides = _overrides(linear, config.layers)
    targets: dict[str, tuple[type[QuantizedLinear], Any]] = {}
    for name in linear:
        override = overrides.get(name, {})
        if name not in skipped and override != KEEP:
            targets[name] = config.choose(override)
    if not targets:
        raise NotImplementedError(
            f"{type(model).__name__} has {len(linear)} linear layers (torch.nn.Linear), and the config leaves out all"
            if linear
            else f"{type(model).__name__} has no linear layers (torch.nn.Linear) to quantize"
        )
    return Plan(targets, tuple(name for name in linear if name not in targets), frozenset(tied & set(targets)))


def tied_modules(model: PreTrainedModel) -> set[str]:
    """The modules whose weight is tied to another's."""
    keys: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    return {key.removesuffix(".weight") for key in (*keys, *keys.values())}


def names(entry: str, module: str) -> bool:
    """Whether an entry of ``skip`` names a module: its name, the end of it, or a module around it."""
    return f".{entry}." in f".{module}."


def _skipped(linear: list[str], skip: list[str] | None, model: PreTrainedModel, tied: set[str]) -> set[str]:
    if skip is None:
        head = model.get_output_embeddings()
        heads = {name for name, module in model.named_modules() if module is head and head is not None}
        kept = tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
        return {name for name in linear if name in tied | heads or any(names(entry, name) for entry in kept)}
    for entry in skip:
        _check_named(entry, linear, "skip")
    return {name for name in linear if any(names(entry, name) for entry in skip)}


def _overrides(linear: list[str], layers: Mapping[str, Any]) -> dict[str, Any]:
    numbers = {name: int(found[1]) for name in linear if (found := re.search(r"(?:^|\.)(\d+)(?:\.|$)", name))}
    count = max(numbers.values(), default=-1) + 1
    result: dict[str, Any] = {}
    for key, override in layers.items():
        if re.fullmatch(r"-?\d+(?:-\d+)?", key):
            indices = layer_indices(key, count)
            named = [name for name, number in numbers.items() if number in indices]
        else:
            _check_named(key, linear, "layers")
            named = [name for name in linear if names(key, name)]
        result.update(dict.fromkeys(named, override))
    return result


def _check_named(entry: str, linear: Iterable[str], option: str) -> None:
    if not any(names(entry, name) for name in linear):
        parts = dict.fromkeys(part for name in linear for part in name.split(".") if not part.isdigit())
        raise ValueError(
            f"{option} names {entry!r}, and no linear layer of this model is called so. "
            f"Parts of their names: {', '.join(parts)}.{registry.closest(entry, parts)}"
        )
