"""Quantized weights as they are written on the command line: ``rtn``, ``rtn-int4``, ``bnb-nf4:block_size=128``."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .. import registry
from ..specs import WeightQuantizerSpec
from .settings import parse_setting

if TYPE_CHECKING:
    from ..weights.config import WeightConfig


@dataclass(frozen=True)
class WeightSetting:
    """A backend and its options.

    Attributes
    ----------
    backend
        The name of a weight quantizer.
    options
        As `hfkv.WeightConfig` takes them.
    label
        What a table calls it.
    """

    backend: str
    options: dict[str, Any] = field(default_factory=dict)
    label: str = ""

    def config(self, tokenizer: Any = None) -> WeightConfig:
        """The config; a backend that reads a calibration text gets the tokenizer. Errors as of the config."""
        from ..weights.config import WeightConfig

        found = WeightConfig(self.backend, **self.options)
        if tokenizer is not None and found.options.get("tokenizer", tokenizer) is None:
            found = WeightConfig(self.backend, **self.options, tokenizer=tokenizer)
        return found


def parse_weights(text: str) -> WeightSetting:
    """``NAME``, ``NAME-TYPE`` or either with ``:key=value,key=value``.

    ``TYPE`` is ``int`` and a number of bits (``int4`` is ``nbits=4``), or a backend's ``quant_type`` (``nf4``, ``fp4``,
    ``float8``).

    Raises
    ------
    ValueError
        Not of this form, an unknown backend, or a type beside an option that says the same.
    ImportError
        The backend's requirements are not installed.
    """
    written, given = parse_setting(text, "weights")
    name, dash, kind = written.rpartition("-")
    if written in registry.manager().specs(WeightQuantizerSpec) or not dash:
        name, kind = written, ""
    registry.manager().find(WeightQuantizerSpec, name, "weights")
    options = dict(given)
    if kind:
        bits = re.fullmatch(r"int(\d+)", kind)
        key, value = ("nbits", int(bits[1])) if bits else ("quant_type", kind)
        if key in given:
            raise ValueError(f"{text!r} says {key} twice: write {name}-{kind} or {name}:{key}={given[key]}")
        options[key] = value
    label = " ".join([written, *(f"{key}={value}" for key, value in given.items())])
    return WeightSetting(name, options, label)
