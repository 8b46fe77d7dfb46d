"""What a decoding loop of ours needs of transformers' internals; with `integration`, all that touches them.

It is for `hfkv.speculation`: how `generate` hands over, what a forward is given, what comes back.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .defaults import get_default_assistant

if TYPE_CHECKING:
    import torch


def cache_argument(model: Any) -> str:
    """What the model's forward calls its cache: ``"cache"`` since transformers 5.24, ``"past_key_values"`` before."""
    # a forward that was wrapped may name neither: then what `generate` itself calls it
    for function in (model.forward, getattr(model, "prepare_inputs_for_generation", None)):
        for name in ("cache", "past_key_values"):
            if function is not None and name in inspect.signature(function).parameters:
                return name
    return "cache"


def mode_arguments_wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
    """``_extract_generation_mode_kwargs``: `generate` drops the streamer and the tokenizer of a custom function."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def _extract_generation_mode_kwargs(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        if not getattr(given["custom_generate"], "takes_mode_arguments", False):
            return original(self, *args, **kwargs)
        if given["assistant_model"] is not None:
            raise ValueError(
                "assistant_model beside hfkv.assistant(...): one of them can draft. "
                'A draft model is hfkv.assistant("model", model, assistant_model=...)'
            )
        wanted = {
            "tokenizer": given["kwargs"].get("tokenizer"),
            "streamer": given["streamer"],
            "synced_gpus": given["synced_gpus"],
        }
        found = original(self, *args, **kwargs)
        return found | {name: value for name, value in wanted.items() if value is not None}

    return _extract_generation_mode_kwargs


def sample_wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
    """``_sample``, greedy search included: decodes with the model's default assistant, where it has one."""

    @functools.wraps(original)
    def _sample(
        self: Any,
        input_ids: Any,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        arguments = (input_ids, logits_processor, stopping_criteria, generation_config)
        stored = None
        # an assistant of transformers' own generates too
        if not generation_config.is_assistant and generation_config.use_cache is not False and not args:
            stored = get_default_assistant(generation_config, self.generation_config)
        if stored is None:
            return original(self, *arguments, *args, **kwargs)
        from .speculation.door import default_assistant

        return default_assistant(self, stored)(
            self,
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            **kwargs,
        )

    return _sample


def check(model: Any, generation_config: Any, model_kwargs: Mapping[str, Any], name: str) -> Any:
    """The cache of a call that can be decoded speculatively.

    Raises
    ------
    ValueError
        The call asks for another decoding method, or for no cache.
    NotImplementedError
        The cache cannot take tokens back, or the call asks for outputs that the loop does not collect.
    """
    # with a custom function, transformers looks at none of these
    for option, plain in (("num_beams", 1), ("prompt_lookup_num_tokens", None), ("assistant_early_exit", None)):
        value = getattr(generation_config, option, None)
        if value not in (plain, None):
            raise ValueError(
                f"{option}={value!r} asks for another way to decode than the assistant {name!r}: leave one of them out"
            )
    for option in ("output_attentions", "output_hidden_states"):
        if getattr(generation_config, option) and generation_config.return_dict_in_generate:
            raise NotImplementedError(f"{option}=True is not supported with the assistant {name!r}: generate without")
    cache = model_kwargs.get(cache_argument(model))
    if generation_config.use_cache is False or cache is None:
        raise ValueError(f"the assistant {name!r} needs a cache: use_cache must not be False")
    if getattr(model, "_is_stateful", False):
        raise NotImplementedError(f"{type(model).__name__} keeps a state that cannot be taken back, as drafts must be")
    for layer in decoder_layers(cache):
        if not _can_take_back(layer):
            what = getattr(layer, "technique", type(layer).__name__)
            raise NotImplementedError(
                f"the cache {what!r} cannot crop, and the assistant {name!r} takes rejected tokens back. "
                "Generate without it, or choose another cache"
            )
    return cache


def _can_take_back(layer: Any) -> bool:
    from transformers.cache_utils import QuantizedLayer

    # transformers' quantized layers before 5.24 say that they crop, and crop what is not quantized yet
    return hasattr(layer, "record_past") or (layer.is_croppable and not isinstance(layer, QuantizedLayer))


def decoder_layers(cache: Any) -> list[Any]:
    """The layers of the decoder's own cache."""
    layers: list[Any] = getattr(cache, "self_attention_cache", cache).layers
    return layers


def record_past(cache: Any) -> None:
    """Let layers that forget (sliding windows) and that pack wait for the crop after each forward."""
    cache.activate_past_recording()


def forget_past(cache: Any) -> None:
    """Undo `record_past`: who goes on with the cache may not crop."""
    for layer in decoder_layers(cache):
        if getattr(layer, "record_past", False):
            layer.record_past = False


@contextmanager
def taken_back(layers: list[Any]) -> Iterator[None]:
    """Leave layers as they were, whatever is stored in them meanwhile, and however that ends.

    Layers of transformers never write into a tensor that they hold, and are given back those that they had; with them
    what a sliding window has forgotten meanwhile. Others crop.
    """
    held = [(layer, dict(vars(layer)) if _holds_tensors(layer) else layer.get_seq_length()) for layer in layers]
    try:
        yield
    finally:
        for layer, before in held:
            if isinstance(before, dict):
                vars(layer).clear()
                vars(layer).update(before)
            else:
                layer.crop(before - layer.get_seq_length())


def _holds_tensors(layer: Any) -> bool:
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    return type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)


def forget_as_ever(layers: list[Any]) -> None:
    """Inside `taken_back`, before each forward: transformers' sliding windows need not keep what nothing crops.

    Those before 5.24 are wrong after two forwards without a crop.
    """
    for layer in layers:
        if _holds_tensors(layer) and getattr(layer, "record_past", False):
            layer.record_past = False


def draft_cache(model: Any) -> Any:
    """An empty cache for a model that drafts, which gives token after token before anything is cropped.

    Sliding layers keep all tokens: those of transformers before 5.24 are wrong after two forwards without a crop.
    """
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    simple = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)
    return DynamicCache() if simple else cache


def steps_ahead(cache: Any) -> int | None:
    """How many tokens a forward may give so that each sees what it would alone; None: any number."""
    limits = [layer.steps_ahead() for layer in decoder_layers(cache) if hasattr(layer, "steps_ahead")]
    return min((limit for limit in limits if limit is not None), default=None)


def positions(
    model: Any, kwargs: Mapping[str, Any], columns: int, start: int, stop: int, before: int = 0
) -> dict[str, torch.Tensor]:
    """Mask and positions of the columns from ``start`` to ``stop``, for a drafting forward.

    ``kwargs`` are the target's, of ``columns`` columns; further ones are real tokens. The cache that is drafted from
    holds ``before`` tokens from before this call.
    """
    import torch

    result = {}
    mask = kwargs.get("attention_mask")
    further = max(0, stop - columns)
    if mask is not None:
        mask = torch.nn.functional.pad(mask[:, -columns - before :], (0, further), value=1)[:, : stop + before]
        result["attention_mask"] = mask
    ids = kwargs.get("position_ids")
    if ids is not None and ids.ndim == 2 and "position_ids" in inspect.signature(model.forward).parameters:
        after = ids[:, -1:] + torch.arange(1, further + 1, device=ids.device)
        result["position_ids"] = torch.cat([ids[:, -columns:], after], dim=1)[:, start:stop]
    return result


def check_trees(model: Any, cache: Any, name: str) -> None:
    """Raise NotImplementedError where a forward cannot verify a tree of drafts.

    Each node must see its ancestors alone, which takes a mask of our own, and what stands must be moved together in the
    cache, which takes one that keeps every token as it is.
    """
    from transformers.cache_utils import DynamicCache, DynamicLayer

    fix = f"Let the assistant {name!r} draft chains: leave `branches` out"
    config = model.config.get_text_config(decoder=True)
    # a window that the model asks for needs its own mask, whatever cache was handed over
    layers = [*decoder_layers(cache), *DynamicCache(config=config).layers]
    others = {type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer}
    if others:
        raise NotImplementedError(
            f"branches: a tree of drafts needs a cache that keeps every token as it is, and here are layers of "
            f"{', '.join(sorted(others))}. {fix}"
        )
    attention = model.config._attn_implementation
    several = "mrope_section" in (getattr(config, "rope_parameters", None) or {})
    if (
        attention not in ("sdpa", "eager")
        or several
        or "position_ids" not in inspect.signature(model.forward).parameters
    ):
        raise NotImplementedError(
            f"branches: a tree of drafts needs a mask and one position a token of its own, which "
            f"{type(model).__name__} with attn_implementation={attention!r} does not take. {fix}"
        )


def tree_inputs(
    past: torch.Tensor, sees: torch.Tensor, position_ids: torch.Tensor, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Mask and positions of a forward over places of a tree, for one row.

    Parameters
    ----------
    past
        ``[tokens]``: which tokens in the cache all places see.
    sees
        ``[places, further]``: which of the tokens after those each place sees, its own included.
    position_ids
        ``[1, places]``.
    dtype
        The model's.
    """
    import torch

    seen = torch.cat([past.bool().expand(len(sees), -1), sees.to(past.device)], dim=1)
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)
    return {"attention_mask": mask[None, None], "position_ids": position_ids}


def keep_places(cache: Any, length: int, places: list[int]) -> None:
    """Of the tokens behind ``length``, keep those at these places, in this order."""
    for layer in decoder_layers(cache):
        extra = layer.get_seq_length() - length - len(places)
        for states in (layer.keys, layer.values):
            tail = states[:, :, length:]
            tail[:, :, : len(places)] = tail[:, :, places]
        layer.crop(-extra)


def last_logits(model: Any) -> dict[str, int]:
    """The keyword that lets a forward compute the last token's logits only, where the model has it."""
    return {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}


def generate_output(model: Any, generation_config: Any, sequences: Any, scores: Any, logits: Any, cache: Any) -> Any:
    """What `generate` returns."""
    if not generation_config.return_dict_in_generate:
        return sequences
    from transformers.generation import utils

    kind = utils.GenerateEncoderDecoderOutput if model.config.is_encoder_decoder else utils.GenerateDecoderOnlyOutput
    return kind(
        sequences=sequences,
        scores=scores if generation_config.output_scores else None,
        logits=logits if generation_config.output_logits else None,
        **{cache_argument(model): cache},
    )
