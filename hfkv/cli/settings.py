"""Caches as they are written on the command line: ``NAME``, ``NAME:key=value,key=value`` or a JSON file."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import registry
from ..defaults import KEY
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
    title
        What a table calls it, in place of its name and options.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    title: str = ""

    @property
    def label(self) -> str:
        """What a table calls it."""
        if self.title:
            return self.title
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

    A file ``NAME.json`` is what `generate` takes: ``{"cache_implementation": ..., "cache_config": {...}}``, or a
    ``generation_config.json`` with the default that `hfkv.set_default` stores.

    Raises
    ------
    ValueError
        Not of this form.
    """
    if text.endswith(".json"):
        setting = _read(Path(text))
        name, options, title = setting.name, setting.options, setting.title
    else:
        name, options = parse_setting(text, "cache")
        title = ""
    return Setting(name, dict(parse_option(part) for part in shared) | options, title)


def parse_setting(text: str, kind: str) -> tuple[str, dict[str, Any]]:
    """``NAME:key=value,key=value``: the name and the options.

    Parameters
    ----------
    kind
        What is named, for the message.
    """
    name, _, own = text.partition(":")
    if not name:
        raise ValueError(f"{text!r} names no {kind}; write NAME or NAME:key=value,key=value")
    return name.strip(), dict(parse_option(part) for part in _split(own) if part)


def _read(path: Path) -> Setting:
    """The cache that a JSON file names, called by the file's name."""
    form = '{"cache_implementation": "kivi", "cache_config": {"nbits": 4}}'
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{str(path)!r}: no such file. Fix: name one that is there, or write NAME:key=value") from None
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is not JSON: {error}. Fix: write it as {form}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{str(path)!r} names no cache. Fix: write it as {form}")
    # a generation_config.json may have both; what it names outright comes first, as in `generate`
    options = content.get("cache_config") or {}
    name = content.get("cache_implementation")
    if name is None and isinstance(content.get(KEY), dict):
        options = dict(content[KEY])
        name = options.pop("cache", None)
    if not isinstance(name, str) or not isinstance(options, dict):
        raise ValueError(f"{str(path)!r} names no cache. Fix: write it as {form}")
    return Setting(name, options, path.parent.name if path.name == "generation_config.json" else path.stem)


def _split(text: str) -> list[str]:
    """The parts between commas that stand in no bracket and no quotes."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        depth += (character in "([{") - (character in ")]}") if not quote else 0
        if character == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def parse_option(text: str) -> tuple[str, Any]:
    """``key=value``; the value is JSON or a Python literal, or else a string.

    Raises
    ------
    ValueError
        Not of this form, or a bracket that is not closed.
    """
    key, equals, value = (part.strip() for part in text.partition("="))
    if not (key and equals):
        raise ValueError(f"{text!r} is not of the form key=value")
    for read in (json.loads, ast.literal_eval):
        try:
            return key, read(value)
        except (ValueError, SyntaxError):
            continue
    if value[:1] in tuple("[{("):
        raise ValueError(f'{key}={value} is not JSON; write lists and dicts as [1, 2] and {{"0": "dynamic"}}')
    return key, value
