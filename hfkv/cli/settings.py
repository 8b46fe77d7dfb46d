"""Caches as they are written on the command line: ``NAME`` or ``NAME:key=value,key=value``."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .. import registry
from ..specs import CacheSpec

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

# transformers' own cache that takes options
QUANTIZED = "quantized"


@dataclass(frozen=True)
class Setting:
    """A cache and its options, as `generate` takes them.

    Attributes
    ----------
    name
        The ``cache_implementation``; ``"dynamic"`` is transformers' plain cache.
    options
        The ``cache_config``.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """What a table calls it."""
        name = "plain" if self.name == PLAIN.name else self.name
        return " ".join([name, *(f"{key}={value}" for key, value in self.options.items())])

    @property
    def is_ours(self) -> bool:
        """Whether a plugin provides it."""
        return self.name in registry.manager().specs(CacheSpec)

    def check(self) -> None:
        """Raise what `generate` would for the name and the options, before a model is loaded.

        Raises
        ------
        ValueError, ImportError
            As `hfkv.make_cache`.
        """
        if self.name in registry.RESERVED[CacheSpec]:
            if self.options and self.name != QUANTIZED:
                raise ValueError(f"the cache {self.name!r} takes no options, got {self.options}")
            return
        options = {key: value for key, value in self.options.items() if key != "layers"}
        registry.find(CacheSpec, self.name, "cache").Options.parse(options, self.name)

    def generate_arguments(self) -> dict[str, Any]:
        """The keywords for `generate`."""
        arguments: dict[str, Any] = {"cache_implementation": self.name}
        return arguments | {"cache_config": dict(self.options)} if self.options else arguments

    def make(self, model: PreTrainedModel) -> Cache | None:
        """An empty cache to decode with; None for caches of transformers that grow to no given length."""
        from transformers import DynamicCache, QuantizedCache

        from ..cache.build import make_cache

        if self.is_ours:
            return make_cache(self.name, model, **self.options)
        config = model.config.get_text_config(decoder=True)
        if self.name == "dynamic":
            return DynamicCache(config=config)
        if self.name == QUANTIZED:
            return QuantizedCache(config=config, **{"backend": "quanto", **self.options})
        return None


PLAIN = Setting("dynamic")


def parse_cache(text: str, shared: Iterable[str] = ()) -> Setting:
    """``NAME:key=value,key=value`` with the ``key=value`` texts that all caches share; its own come first.

    Raises
    ------
    ValueError
        Not of this form.
    """
    name, _, own = text.partition(":")
    if not name:
        raise ValueError(f"{text!r} names no cache; write NAME or NAME:key=value,key=value")
    options = dict(parse_option(part) for part in own.split(",") if part)
    return Setting(name, dict(parse_option(part) for part in shared) | options)


def parse_option(text: str) -> tuple[str, Any]:
    """``key=value``; the value is a Python literal, or else a string."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise ValueError(f"{text!r} is not of the form key=value")
    try:
        return key.strip(), ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key.strip(), value
