"""What attention is handed, layer by layer: queries, keys and values after the rotary embedding, the mask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from hfkv.cli.quality import log_probabilities, read

NAME = "hfkv_lab_recorder"


@dataclass(frozen=True)
class Call:
    """One layer's attention in one forward.

    Attributes
    ----------
    module
        The attention module.
    query
        ``[batch, heads, queries, head_dim]``.
    key, value
        ``[batch, kv_heads, tokens, head_dim]``, the current tokens last.
    mask
        As the model made it, or None.
    arguments
        What else the attention function was given.
    rotary
        Cosine and sine ``[batch, queries, head_dim]`` of the current tokens; None without rotary embedding.
    """

    module: Any
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    arguments: dict[str, Any]
    rotary: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def layer(self) -> int:
        """The layer's index."""
        index: int = self.module.layer_idx
        return index

    @property
    def is_sliding(self) -> bool:
        """Whether the layer sees a window only."""
        return (
            getattr(self.module, "sliding_window", None) is not None
            and self.arguments.get("sliding_window") is not None
        )

    def output(self, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The attention output ``[batch, queries, heads, value_head_dim]`` with other keys and values."""
        result: torch.Tensor = _sdpa()(self.module, self.query, key, value, self.mask, **self.arguments)[0]
        return result

    def weights(self, key: torch.Tensor) -> torch.Tensor:
        """The attention weights ``[batch, heads, queries, tokens]`` with these keys, in float32."""
        heads = self.query.shape[1] // key.shape[1]
        scale = self.arguments.get("scaling") or self.query.shape[-1] ** -0.5
        scores = self.query.float() @ key.float().repeat_interleave(heads, dim=1).transpose(2, 3) * scale
        queries, tokens = scores.shape[2:]
        if self.mask is None:
            allowed = torch.ones(queries, tokens, dtype=torch.bool, device=scores.device).tril(tokens - queries)
        elif self.mask.dtype == torch.bool:
            allowed = self.mask
        else:
            return (scores + self.mask.float()).softmax(-1)
        return scores.masked_fill(~allowed, float("-inf")).softmax(-1)


def _sdpa() -> Callable[..., Any]:
    function: Callable[..., Any] = AttentionInterface()["sdpa"]
    return function


@dataclass
class Recorder:
    """The calls of the forwards inside `recording`."""

    calls: list[Call] = field(default_factory=list)
    rotary: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


@contextmanager
def recording(model: PreTrainedModel) -> Iterator[Recorder]:
    """Record every attention call of a model.

    Raises
    ------
    NotImplementedError
        The model does not compute attention through transformers' attention interface.
    """
    recorder = Recorder()

    def attention(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **arguments: Any
    ) -> Any:
        recorder.calls.append(Call(module, query, key, value, mask, arguments, recorder.rotary.get(id(module))))
        return _sdpa()(module, query, key, value, mask, **arguments)

    def note_rotary(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get("position_embeddings") is not None:
            recorder.rotary[id(module)] = kwargs["position_embeddings"]

    AttentionInterface.register(NAME, attention)
    # without a mask function of its own the model would be given no mask at all
    AttentionMaskInterface.register(NAME, sdpa_mask)
    before = model.config._attn_implementation
    hooks = [
        module.register_forward_pre_hook(note_rotary, with_kwargs=True)
        for module in model.modules()
        if hasattr(module, "layer_idx")
    ]
    try:
        model.set_attn_implementation(NAME)
        yield recorder
    finally:
        model.set_attn_implementation(before)
        for hook in hooks:
            hook.remove()
    if not recorder.calls:
        raise NotImplementedError(
            f"{type(model).__name__} does not compute attention through transformers' attention interface, so its keys "
            "and values cannot be seen"
        )


def record(model: PreTrainedModel, input_ids: torch.Tensor, queries: int) -> list[Call]:
    """The attention calls of the last ``queries`` of ``[1, tokens]``, with the keys and values of all tokens."""
    input_ids = input_ids.to(model.device)
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    read(model, input_ids[:, :-queries], cache)
    with recording(model) as recorder:
        for _ in log_probabilities(model, input_ids[:, -queries:], 0, cache, queries):
            pass
    return recorder.calls
