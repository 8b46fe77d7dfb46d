"""Build a cache by name for a model: the technique where it applies, transformers' own layers elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from .. import integration, registry
from ..specs import CacheSpec
from .cache import HFKVCache
from .layer import KVLayer, LayerContext
from .options import CacheOptions
from .padding import Padding

# in an override: the layer keeps what transformers gives it
KEEP = "dynamic"


def make_cache(name: str, model_or_config: PreTrainedModel | PretrainedConfig, **options: Any) -> HFKVCache:
    """Build a cache for a model.

    Full-attention layers get the technique; sliding, chunked, linear and KV-sharing layers keep transformers' own.

    Parameters
    ----------
    name
        A registered cache, e.g. ``"kivi"``.
    model_or_config
        The model, or its config (a composite config's text part is used).
    **options
        The technique's options, and ``layers``: overrides by layer, e.g.
        ``{"0": {"nbits": 8}, "1-3": "dynamic", "-1": {"nbits": 4}}``; later entries win.

    Returns
    -------
    transformers.Cache
        Pass it as ``cache=`` (``past_key_values=`` before transformers 5.24) to `generate` or to the model.

    Raises
    ------
    ValueError
        Unknown name or option, or a value that is not allowed.
    ImportError
        The technique's requirements are not installed.
    """
    config = getattr(model_or_config, "config", model_or_config).get_text_config(decoder=True)
    integration.enable_fused_attention()
    layers: list[Any] = list(DynamicCache(config=config).layers)
    eligible = [index for index, layer in enumerate(layers) if type(layer) is DynamicLayer]
    overrides = dict(options)
    by_layer = _by_layer(overrides.pop("layers", {}), len(layers), eligible)
    padding = Padding()
    builders: dict[int, Callable[[LayerContext], KVLayer]] = {}
    base = _builder(name, overrides)
    for index in eligible:
        override = by_layer.get(index)
        if override == KEEP:
            continue
        builders[index] = base if override is None else _builder(*_override(name, overrides, override))
        layers[index] = builders[index](LayerContext(index, config, padding))
    return HFKVCache(name, layers, padding)


def _builder(name: str, options: Mapping[str, Any]) -> Callable[[LayerContext], KVLayer]:
    layer_class: type[KVLayer] = registry.find(CacheSpec, name, "cache_implementation")
    parsed: CacheOptions = layer_class.Options.parse(options, name)
    return lambda context: layer_class(parsed, context)


def _override(name: str, base: Mapping[str, Any], override: Any) -> tuple[str, dict[str, Any]]:
    """The technique and the options of one overridden layer."""
    if isinstance(override, str):
        return override, {}
    own = dict(override)
    technique = own.pop("cache", name)
    return technique, {**base, **own} if technique == name else own


def _by_layer(given: Any, count: int, eligible: list[int]) -> dict[int, Any]:
    if not isinstance(given, Mapping):
        raise ValueError(f"layers={given!r} must be a dict such as {{'0': {{'nbits': 8}}, '1-3': 'dynamic'}}")
    result: dict[int, Any] = {}
    for key, override in given.items():
        if not isinstance(override, str | Mapping):
            raise ValueError(f"layers[{key!r}]={override!r} must be a dict of options or the name of a cache")
        indices = _indices(key, count)
        named = [index for index in indices if index in eligible]
        if not named:
            raise ValueError(
                f"layers[{key!r}] names no full-attention layer; such layers of this model: {eligible}. "
                "Other layers keep transformers' own cache"
            )
        result.update(dict.fromkeys(named, override))
    return result


def _indices(key: object, count: int) -> range:
    match = re.fullmatch(r"(-?\d+)(?:-(\d+))?", str(key).strip())
    if match is None:
        raise ValueError(f"layers[{key!r}]: write a layer as '0' or '-1', or a range as '1-3'")
    first = int(match[1])
    first = first + count if first < 0 else first
    last = first if match[2] is None else int(match[2])
    if not 0 <= first <= last < count:
        raise ValueError(f"layers[{key!r}] is outside this model's layers 0 to {count - 1}")
    return range(first, last + 1)
