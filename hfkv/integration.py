"""What touches transformers' internals, with `decoding`; every difference between its versions lives in these two.

What is patched, and undone by `restore`:

* ``generation.configuration_utils.ALL_CACHE_IMPLEMENTATIONS``: the names that `GenerationConfig.validate` accepts;
* ``GenerationMixin._prepare_cache_for_generation``: builds the cache that was asked for by name;
* ``GenerationMixin._prepare_generation_config``: lets options go with the cache that they were written for, and refuses
  a model that builds its own cache, before anything is computed;
* ``GenerationMixin.init_continuous_batching``: refuses options that continuous batching would drop;
* ``GenerationMixin._extract_generation_mode_kwargs``: hands streamer and tokenizer to an assistant's decoding loop;
  `generate` drops them where ``custom_generate`` is a function;
* ``GenerationMixin._sample``: decodes with a model's default assistant;
* ``PreTrainedModel.post_init``: makes the changes of a model's modules that its config asks for;
* the attention function ``"sdpa"``: reads packed handles without dequantizing them;
* ``AttentionInterface.get_interface``: lets every attention function, a model's own eager one too, read windows;
* ``expand_kv`` of a latent attention, once a window is made for its model: makes keys and values of what is kept;
* the mappings of ``quantizers.auto``: ``quant_method="hfkv"`` is the config and the quantizer of `hfkv.weights`, whose
  `hfkv.weights.hf_quantizer` and `hfkv.weights.encode` implement what transformers asks of a quantizer.

DiffusionGemma's copy of the names is put back (`keep_names_out`): it builds its own caches.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import weakref
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from . import attention, autoload, decoding, patching, registry
from .decoding import cache_argument as cache_argument
from .defaults import KEY, get_default
from .specs import CacheSpec, StructureSpec

if TYPE_CHECKING:
    import torch

_logger = logging.getLogger("hfkv")

_CONFIGURATION = "transformers.generation.configuration_utils"
_NAMES = "ALL_CACHE_IMPLEMENTATIONS"

# transformers' own caches that read `cache_config`
_READS_CONFIG = frozenset({"quantized"})


def restore() -> None:
    """Undo every patch; what somebody else has replaced since is theirs and stays."""
    patching.restore()


def cache_names() -> tuple[str, ...]:
    """The names that plugins registered."""
    return tuple(registry.manager().specs(CacheSpec))


def _with_ours(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*names, *cache_names())))


def add_names(configuration_utils: ModuleType) -> None:
    """Let `GenerationConfig.validate` accept the registered names."""
    # the STATIC and DYNAMIC tuples route inside generate: they stay as they are
    patching.replace(configuration_utils, _NAMES, _with_ours)
    for plugin in registry.plugins():
        if plugin.error is not None:
            _logger.warning("hfkv left out the plugin %r: %s", plugin.name, plugin.error)


def refresh_names() -> None:
    """Accept the names that are registered now, where `add_names` has run."""
    configuration_utils = sys.modules.get(_CONFIGURATION)
    if patching.undo(configuration_utils, _NAMES):
        patching.replace(configuration_utils, _NAMES, _with_ours)


def keep_names_out(diffusion_gemma: ModuleType) -> None:
    """Let DiffusionGemma refuse our names: it copies the tuple of names, and builds transformers' caches only."""
    # not there in a release that no longer copies it
    names = getattr(diffusion_gemma, _NAMES, ())
    setattr(diffusion_gemma, _NAMES, tuple(name for name in names if name not in cache_names()))


def add_weight_quantizer(auto: ModuleType) -> None:
    """Let `from_pretrained` read and make quantized weights of ours; no plugin is loaded for it."""
    from .weights.config import METHOD, WeightConfig
    from .weights.hf_quantizer import HFKVWeightQuantizer

    patching.add(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, METHOD, WeightConfig)
    patching.add(auto.AUTO_QUANTIZER_MAPPING, METHOD, HFKVWeightQuantizer)


def wrap_models(modeling_utils: ModuleType) -> None:
    """Let models be built with the structure that their config asks for: ``config.hfkv = {name: settings}``."""
    patching.replace(modeling_utils.PreTrainedModel, "post_init", _post_init_wrapper)


def _post_init_wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def post_init(self: Any) -> None:
        original(self)
        for name, settings in (getattr(self.config, KEY, None) or {}).items():
            registry.find(StructureSpec, name, f"config.{KEY}")(self, **settings)

    return post_init


def wrap_generation(utils: ModuleType) -> None:
    """Let `generate` build the registered caches."""
    mixin = utils.GenerationMixin
    patching.replace(mixin, "_prepare_cache_for_generation", _prepare_cache_wrapper)
    patching.replace(mixin, "_prepare_generation_config", _prepare_config_wrapper)
    patching.replace(mixin, "init_continuous_batching", _continuous_batching_wrapper)
    patching.replace(mixin, "_extract_generation_mode_kwargs", decoding.mode_arguments_wrapper)
    patching.replace(mixin, "_sample", decoding.sample_wrapper)


def _prepare_config_wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def _prepare_generation_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        generation_config = result[0] if isinstance(result, tuple) else result
        given = signature.bind(self, *args, **kwargs).arguments
        _settle_options(generation_config, given.get("kwargs"), given.get("generation_config"), self.generation_config)
        name = generation_config.cache_implementation
        if name in cache_names() and generation_config.use_cache is not False:
            check_model(self, name)
        return result

    return _prepare_generation_config


def _settle_options(generation_config: Any, keywords: Any, passed: Any, model_default: Any) -> None:
    """Let options go with the cache that they were written for: another name, of higher precedence, drops them."""
    if getattr(passed, "is_assistant", False):
        # a copy of the target's config, whose cache is the target's choice; the assistant's is its own model's
        generation_config.cache_config = model_default.cache_config
        if generation_config.cache_implementation in cache_names():
            generation_config.cache_implementation = model_default.cache_implementation
        return
    levels = [keywords or {}, *(vars(config) for config in (passed, model_default) if config is not None)]
    for level in levels:
        if level.get("cache_config") is not None:
            beside = level.get("cache_implementation")
            if beside is not None and beside != generation_config.cache_implementation:
                generation_config.cache_config = None
            return


def check_model(model: Any, name: str) -> None:
    """Raise NotImplementedError for a model whose `generate` cannot be given a cache by name."""
    if not model._supports_default_dynamic_cache():
        raise NotImplementedError(
            f"{type(model).__name__} keeps its state itself and takes no cache, so {name!r} cannot be used"
        )
    if _ignores_names(type(model)):
        raise NotImplementedError(
            f"{type(model).__name__} prepares its own cache and does not read cache_implementation={name!r}. "
            f"If its forward takes a cache, pass one: hfkv.make_cache({name!r}, model)"
        )


def _ignores_names(model_class: type) -> bool:
    """Whether a model overrides the method that we wrap without calling ours."""
    for owner in model_class.__mro__:
        method = vars(owner).get("_prepare_cache_for_generation")
        if method is None:
            continue
        if owner.__name__ == "GenerationMixin":
            return False
        code = getattr(inspect.unwrap(method), "__code__", None)
        # an override that calls super(), or the method of a base by its name, comes to ours in the end
        if code is None or not {"super", "_prepare_cache_for_generation"} & set(code.co_names):
            return True
    return False


def _prepare_cache_wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def _prepare_cache_for_generation(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(self, *args, **kwargs).arguments
        generation_config, model_kwargs = arguments["generation_config"], arguments["model_kwargs"]
        given = next(
            (model_kwargs[key] for key in ("cache", "past_key_values") if model_kwargs.get(key) is not None), None
        )
        request = _requested(self, generation_config, given)
        if request is not None:
            check_model(self, request[0])
            _put_cache(self, *request, generation_config, model_kwargs)
            return None
        # an encoder-decoder cache has ours inside
        ours: Any = getattr(given, "self_attention_cache", given)
        if hasattr(ours, "note_mask"):
            enable_fused_attention()
            ours.note_mask(_token_mask(self, model_kwargs))
        if isinstance(generation_config.cache_config, dict):
            # transformers before 5.24 takes keys out of the user's dict and puts its own in
            generation_config.cache_config = dict(generation_config.cache_config)
        return original(self, *args, **kwargs)

    return _prepare_cache_for_generation


def _requested(model: Any, generation_config: Any, given: Any) -> tuple[str, dict[str, Any], str] | None:
    """The cache of ours that a call to `generate` asks for, its options, and where it is named.

    Raises
    ------
    ValueError
        A ``cache_config`` that nothing would read.
    """
    if generation_config.use_cache is False:
        return None
    name, options = generation_config.cache_implementation, generation_config.cache_config
    if name in cache_names():
        if given is None:
            return name, _as_options(options), "cache_implementation"
        if generation_config.is_assistant:
            # an assistant is handed the cache of its first round in each later one
            generation_config.cache_implementation = None
        # in any other call transformers raises: a cache and a name
        return None
    if name is None and given is None:
        # an assistant's config is a copy of the target's: only its own model's default counts
        default = get_default(*([] if generation_config.is_assistant else [generation_config]), model.generation_config)
        if default is not None:
            return default[0], {**default[1], **_as_options(options)}, f"generation_config.{KEY}"
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
    model: Any, name: str, options: dict[str, Any], named_in: str, generation_config: Any, model_kwargs: dict[str, Any]
) -> None:
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache

    from .cache.build import build_cache

    cache: Any = build_cache(name, model, options, named_in)
    cache.note_mask(_token_mask(model, model_kwargs))
    if model.config.is_encoder_decoder:
        cache = EncoderDecoderCache(cache, DynamicCache(config=model.config.get_text_config(decoder=True)))
    if generation_config.is_assistant:
        cache.activate_past_recording()
    model_kwargs[cache_argument(model)] = cache


def _token_mask(model: Any, model_kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The 2D mask over the tokens that the cache will hold."""
    mask: torch.Tensor | None = model_kwargs.get(
        "decoder_attention_mask" if model.config.is_encoder_decoder else "attention_mask"
    )
    return mask


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
        default = get_default(self.generation_config)
        if default is not None:
            _logger.warning("continuous batching has a paged cache of its own: the default %r is not used", default[0])
        return original(self, *args, **kwargs)

    return init_continuous_batching


def enable_fused_attention() -> None:
    """Let the attention function ``"sdpa"`` read packed handles, where hfkv is active; called for each cache.

    Without it a handle is dequantized at each use: right, and slow.
    """
    if not autoload.is_active():
        _tell_that_attention_is_slow()
        return
    from transformers.modeling_utils import AttentionInterface

    patching.replace(AttentionInterface._global_mapping, "sdpa", attention.wrap)
    patching.replace(AttentionInterface, "get_interface", attention.wrap_interface)


def require_attention(technique: str, model: Any = None) -> None:
    """Make sure that our attention runs, for a cache that no other can read; on latents too, where the model is known.

    Raises
    ------
    NotImplementedError
        hfkv is not active.
    """
    if not autoload.is_active():
        raise NotImplementedError(
            f"hfkv is not active, and only its attention can read the windows of {technique!r}. Fix: hfkv.activate()"
        )
    enable_fused_attention()
    if model is not None:
        for kind in _latent_attentions(model):
            patching.replace(kind, "expand_kv", attention.wrap_expansion)


# by model: one of many experts has tens of thousands of modules to look through
_latent: weakref.WeakKeyDictionary[Any, frozenset[type]] = weakref.WeakKeyDictionary()


def _latent_attentions(model: Any) -> frozenset[type]:
    """The classes of a model's modules that make keys and values of cached latents."""
    if model not in _latent:
        _latent[model] = frozenset(type(module) for module in model.modules() if hasattr(module, "expand_kv"))
    return _latent[model]


@functools.cache
def _tell_that_attention_is_slow() -> None:
    _logger.warning("hfkv is not active, so attention dequantizes a packed cache at each step. Fix: hfkv.activate()")
