"""The only module that touches transformers' internals; every difference between its versions lives here.

What is patched, and undone by `restore`:

* ``generation.configuration_utils.ALL_CACHE_IMPLEMENTATIONS``: the names that `GenerationConfig.validate` accepts;
* ``GenerationMixin._prepare_cache_for_generation``: builds the cache that was asked for by name;
* ``GenerationMixin._prepare_generation_config``: refuses what no cache would read, before anything is computed;
* ``GenerationMixin.init_continuous_batching``: refuses options that continuous batching would drop;
* the attention function ``"sdpa"``: reads packed handles without dequantizing them.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from . import registry
from .defaults import get_default
from .specs import CacheSpec

if TYPE_CHECKING:
    import torch

    from .cache.view import KVView

# undo actions by what they undo, in the order in which they were made
_undo: dict[str, Callable[[], None]] = {}

# transformers' own caches that read `cache_config`
_READS_CONFIG = frozenset({"quantized"})


def restore() -> None:
    """Undo every patch."""
    while _undo:
        _, undo = _undo.popitem()
        undo()


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace an attribute by what ``make`` builds from it, once."""
    key = f"{owner.__name__}.{name}"
    if key in _undo or not hasattr(owner, name):
        return
    original = getattr(owner, name)
    inherited = name not in vars(owner)
    setattr(owner, name, make(original))
    _undo[key] = lambda: delattr(owner, name) if inherited else setattr(owner, name, original)


def cache_names() -> tuple[str, ...]:
    """The names that plugins registered."""
    return tuple(registry.manager().specs(CacheSpec))


def add_names(configuration_utils: ModuleType) -> None:
    """Let `GenerationConfig.validate` accept the registered names."""
    # the STATIC and DYNAMIC tuples route inside generate: they stay as they are
    _replace(configuration_utils, "ALL_CACHE_IMPLEMENTATIONS", lambda names: names + cache_names())


def refresh_names() -> None:
    """Accept names that were registered since `add_names`."""
    key = "transformers.generation.configuration_utils.ALL_CACHE_IMPLEMENTATIONS"
    if key in _undo:
        _undo.pop(key)()
        add_names(sys.modules["transformers.generation.configuration_utils"])


def wrap_generation(utils: ModuleType) -> None:
    """Let `generate` build the registered caches."""
    # the names again: their module may have been half imported when we were activated
    add_names(sys.modules["transformers.generation.configuration_utils"])
    mixin = utils.GenerationMixin
    _replace(mixin, "_prepare_cache_for_generation", _prepare_cache_wrapper)
    _replace(mixin, "_prepare_generation_config", _prepare_config_wrapper)
    _replace(mixin, "init_continuous_batching", _continuous_batching_wrapper)


def _prepare_config_wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _prepare_generation_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        generation_config = result[0] if isinstance(result, tuple) else result
        name = generation_config.cache_implementation
        if name in cache_names() and _ignores_names(type(self)):
            raise NotImplementedError(
                f"{type(self).__name__} prepares its own cache and does not read cache_implementation={name!r}. "
                f"Pass a cache instead: hfkv.make_cache({name!r}, model)"
            )
        return result

    return _prepare_generation_config


def _ignores_names(model_class: type) -> bool:
    """Whether a model overrides the method that we wrap without calling ours."""
    for owner in model_class.__mro__:
        method = vars(owner).get("_prepare_cache_for_generation")
        if method is None:
            continue
        if owner.__name__ == "GenerationMixin":
            return False
        # an override that calls super() comes to ours in the end
        if "super" not in getattr(method, "__code__", None).co_names:  # type: ignore[union-attr]
            return True
    return False


def _prepare_cache_wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def _prepare_cache_for_generation(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(self, *args, **kwargs).arguments
        generation_config, model_kwargs = arguments["generation_config"], arguments["model_kwargs"]
        given = next((model_kwargs[key] for key in ("cache", "past_key_values") if model_kwargs.get(key) is not None), None)
        request = _requested(self, generation_config, given)
        if request is not None:
            if not self._supports_default_dynamic_cache():
                raise NotImplementedError(
                    f"{type(self).__name__} keeps its state itself and takes no cache, so {request[0]!r} cannot be used"
                )
            _put_cache(self, *request, generation_config, model_kwargs)
            return None
        if given is not None and hasattr(given, "note_mask"):
            given.note_mask(_token_mask(self, model_kwargs))
        return original(self, *args, **kwargs)

    return _prepare_cache_for_generation


def _requested(model: Any, generation_config: Any, given: Any) -> tuple[str, dict[str, Any]] | None:
    """The cache of ours that a call to `generate` asks for, with its options.

    Raises
    ------
    ValueError
        A ``cache_config`` that nothing would read.
    """
    if generation_config.use_cache is False:
        return None
    name, options = generation_config.cache_implementation, generation_config.cache_config
    if name in cache_names():
        # with a cache given as well, transformers raises
        return None if given is not None else (name, _as_options(options))
    default = None
    if name is None and given is None:
        default = get_default(generation_config, getattr(model, "generation_config", None))
    if default is not None:
        return default[0], {**default[1], **_as_options(options)}
    if options is not None and name not in _READS_CONFIG:
        used = "the cache that was passed" if given is not None else f"cache_implementation={name!r}"
        raise ValueError(
            f"cache_config={options!r} would be ignored: {used} does not read it. "
            f"Name a cache that does: {', '.join(['quantized', *cache_names()])}"
        )
    return None


def _as_options(cache_config: Any) -> dict[str, Any]:
    if cache_config is None:
        return {}
    if hasattr(cache_config, "to_dict"):
        cache_config = cache_config.to_dict()
    if not isinstance(cache_config, Mapping):
        raise ValueError(f"cache_config={cache_config!r} must be a dict")
    return dict(cache_config)


def _put_cache(
    model: Any, name: str, options: dict[str, Any], generation_config: Any, model_kwargs: dict[str, Any]
) -> None:
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache

    from .cache.build import make_cache

    cache: Any = make_cache(name, model, **options)
    cache.note_mask(_token_mask(model, model_kwargs))
    if model.config.is_encoder_decoder:
        cache = EncoderDecoderCache(cache, DynamicCache(config=model.config.get_text_config(decoder=True)))
    if getattr(generation_config, "is_assistant", False):
        cache.activate_past_recording()
    model_kwargs[cache_argument(model)] = cache


def _token_mask(model: Any, model_kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The 2D mask over the tokens that the cache will hold."""
    mask: torch.Tensor | None = model_kwargs.get(
        "decoder_attention_mask" if model.config.is_encoder_decoder else "attention_mask"
    )
    return mask


def cache_argument(model: Any) -> str:
    """What the model's forward calls its cache: ``"cache"`` since transformers 5.24, ``"past_key_values"`` before."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _continuous_batching_wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init_continuous_batching(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments.get("generation_config")
        generation_config = given if given is not None else self.generation_config
        name = generation_config.cache_implementation
        if name in cache_names():
            raise NotImplementedError(
                f"continuous batching has a paged cache of its own and would ignore cache_implementation={name!r}. "
                "Use generate"
            )
        if generation_config.cache_config is not None:
            raise ValueError(
                f"continuous batching would ignore cache_config={generation_config.cache_config!r}: remove it, or use "
                "generate with a cache that reads it"
            )
        return original(self, *args, **kwargs)

    return init_continuous_batching


def enable_fused_attention() -> None:
    """Let the attention function ``"sdpa"`` read packed handles; called when the first cache is built."""
    if "sdpa" in _undo:
        return
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import AttentionInterface

    original = AttentionInterface._global_mapping.get("sdpa", sdpa_attention_forward)
    AttentionInterface.register("sdpa", _attention_wrapper(original))
    _undo["sdpa"] = lambda: AttentionInterface.register("sdpa", original)


# what an attention function may be given that changes the scores; the original function ignores or refuses the rest
_CHANGES_SCORES = ("position_bias", "softcap")


def _attention_wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def sdpa_attention_forward(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        from .cache.view import KVHandle

        if not isinstance(key, KVHandle):
            return original(module, query, key, value, attention_mask, *args, **kwargs)
        plain = not args and not kwargs.get("dropout") and all(kwargs.get(name) is None for name in _CHANGES_SCORES)
        if not (plain and isinstance(value, KVHandle) and value.view is key.view):
            value = value.dense() if isinstance(value, KVHandle) else value
            return original(module, query, key.dense(), value, attention_mask, *args, **kwargs)
        return _attend(module, query, key.view, attention_mask, kwargs.get("scaling"), kwargs.get("is_causal")), None

    return sdpa_attention_forward


def _attend(
    module: Any,
    query: torch.Tensor,
    view: KVView,
    mask: torch.Tensor | None,
    scaling: float | None,
    is_causal: bool | None,
) -> torch.Tensor:
    """Attention over packed and exact segments: ``[batch, queries, heads, value_head_dim]``."""
    from . import kernels

    if mask is not None:
        if mask.shape[-1] != view.length:
            raise ValueError(
                f"the attention mask covers {mask.shape[-1]} tokens and the cache holds {view.length}: pass the mask of "
                "all tokens, cached ones included"
            )
        mask = view.arrange(mask)
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output, _ = kernels.attend(query, view, mask, scale=scale, causal=causal)
    return output.transpose(1, 2).contiguous()
