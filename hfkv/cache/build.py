"""Build a cache by name for a model: the technique where it applies, transformers' own layers elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache

from .. import integration, registry
from ..layer_range import layer_indices
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
    NotImplementedError
        The model has no layer that the technique works on.
    ImportError
        The technique's requirements are not installed.
    """
    return build_cache(name, model_or_config, options)


def build_cache(
    name: str,
    model_or_config: PreTrainedModel | PretrainedConfig,
    options: Mapping[str, Any],
    named_in: str = "cache_implementation",
) -> HFKVCache:
    """`make_cache` with the options in a mapping, which stays as it is; ``named_in`` is for its messages."""
    config = getattr(model_or_config, "config", model_or_config)
    if not isinstance(config, PretrainedConfig):
        raise TypeError(f"expected a model or its config, got {type(model_or_config).__name__}")
    config = config.get_text_config(decoder=True)
    base = dict(options)
    given_layers = base.pop("layers", {})
    technique = find_technique(name, base, named_in)
    layers: list[Any] = list(DynamicCache(config=config).layers)
    eligible = [index for index, layer in enumerate(layers) if technique.takes(layer)]
    if not eligible:
        kinds = ", ".join(dict.fromkeys(type(layer).__name__ for layer in layers)) or "none"
        raise NotImplementedError(
            f"{name!r} works on full-attention layers, and {type(config).__name__} has none (cache layers: {kinds}). "
            f"Fix: leave out {named_in}, transformers makes a cache for them"
        )
    overrides = _overrides(given_layers, layers, eligible, name, base)
    chosen = {
        index: overrides.get(index, technique) for index in range(len(layers)) if index in {*eligible, *overrides}
    }
    padding = Padding()
    # a layer may ask the model, and watch its attention
    integration.enable_fused_attention()
    model = model_or_config if isinstance(model_or_config, PreTrainedModel) else None
    members: dict[tuple[type[KVLayer], str], list[tuple[CacheOptions, LayerContext]]] = {}
    for index, choice in chosen.items():
        if choice is not None:
            context = LayerContext(index, config, padding, choice.name, layers[index], model, index in overrides)
            members.setdefault((choice.layer_class, choice.name), []).append((choice.options, context))
    for (layer_class, _), its_members in members.items():
        for (_, context), layer in zip(its_members, layer_class.build(its_members), strict=True):
            layers[context.layer_idx] = layer
    return HFKVCache(name, layers, padding)


@dataclass(frozen=True)
class Technique:
    """A cache technique with its options.

    Attributes
    ----------
    name
        As registered.
    layer_class
        What its spec loads.
    options
        Parsed options.
    """

    name: str
    layer_class: type[KVLayer]
    options: CacheOptions

    def takes(self, layer: Any) -> bool:
        """Whether it takes the place of a layer that transformers would make."""
        return self.layer_class.takes(self.options, layer)


def find_technique(name: str, options: Mapping[str, Any], named_in: str) -> Technique:
    """A registered technique with a user's options; ``named_in`` is for its messages."""
    layer_class: type[KVLayer] = registry.find(CacheSpec, name, named_in)
    return Technique(name, layer_class, layer_class.Options.parse(options, name))


def _overrides(
    given: Any, layers: list[Any], eligible: list[int], name: str, base: Mapping[str, Any]
) -> dict[int, Technique | None]:
    """The technique of each overridden layer; None for one that keeps what transformers gives it."""
    if not isinstance(given, Mapping):
        raise ValueError(f"layers={given!r} must be a dict such as {{'0': {{'nbits': 8}}, '1-3': 'dynamic'}}")
    result: dict[int, Technique | None] = {}
    for key, override in given.items():
        technique = _override(key, override, name, base)
        indices = layer_indices(key, len(layers))
        if technique is None:
            named = [index for index in indices if index in eligible]
        else:
            named = [index for index in indices if technique.takes(layers[index])]
        if not named:
            raise ValueError(
                f"layers[{key!r}] names no full-attention layer; such layers of this model: {eligible}. "
                "Other layers keep transformers' own cache"
            )
        result.update(dict.fromkeys(named, technique))
    return result


def _override(key: object, override: Any, name: str, base: Mapping[str, Any]) -> Technique | None:
    if not isinstance(override, str | Mapping):
        raise ValueError(f"layers[{key!r}]={override!r} must be a dict of options or the name of a cache")
    own = {"cache": override} if isinstance(override, str) else dict(override)
    technique = own.pop("cache", name)
    if "layers" in own:
        raise ValueError(f"layers[{key!r}] has overrides of its own: write them beside it")
    if technique == KEEP:
        if own:
            raise ValueError(f"layers[{key!r}]={override!r}: {KEEP!r} takes no options")
        return None
    named_in = f"layers[{key!r}]"
    if technique != name:
        # another technique has other options: it starts from its own defaults
        return find_technique(technique, own, named_in)
    layer_class: type[KVLayer] = registry.find(CacheSpec, name, named_in)
    return find_technique(name, layer_class.Options.merge(base, own), named_in)
