"""Attention whose cache holds latents: a few numbers for the keys of all heads, a few for the values.

Chang et al., "Palu: Compressing KV-Cache with Low-Rank Projection", 2024. A projection becomes the product of two, down
to ``rank`` latents and up again. Any cache stores the latents, as one head of ``rank`` channels; attention is given
what they stand for: keys and values of all tokens, made anew in each forward, the keys turned by the position of their
token.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import Cache

from hfkv.cache.window import WindowHandle

from .latent_positions import check_neighbours, turns

NAME = "latent"
PROJECTIONS = ("k_proj", "v_proj")
# what turns keys in transformers' model files: (query, key, cos, sin) -> both, turned
_ROTATE = "apply_rotary_pos_emb"

Rotate = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def restore(model: Any, rank: int) -> None:
    """Give a model that has not been changed projections of that rank; what `from_pretrained` calls.

    Layers without projections of their own (they share another's) stay as they are.

    Raises
    ------
    NotImplementedError
        The model has no rotary embedding in its decoder, or its file none of transformers' ways to apply it.
    """
    decoder = next((module for module in model.modules() if hasattr(module, "rotary_emb")), None)
    attentions = [
        module
        for module in model.modules()
        if all(isinstance(getattr(module, name, None), nn.Linear) for name in PROJECTIONS)
    ]
    for attention in attentions:
        rotate = getattr(sys.modules[type(attention).__module__], _ROTATE, None)
        if decoder is None or rotate is None:
            raise NotImplementedError(
                f"{type(attention).__name__} does not turn its keys by rotary_emb and {_ROTATE}, and keys made of "
                "latents are turned by them. Fix: leave out latents for this architecture"
            )
        for name in PROJECTIONS:
            setattr(attention, name, LatentProjection(getattr(attention, name), rank))
        # first: what others put in the cache's place stands in front of ours, and is given keys and values
        attention.register_forward_pre_hook(
            partial(_enter, rotary=decoder.rotary_emb, rotate=rotate, is_first=attention is attentions[0]),
            prepend=True,
            with_kwargs=True,
        )


class LatentProjection(nn.Module):
    """A projection as the product of two: down to latents, and up to what the projection gave.

    Its empty weight takes the place of the projection's in a saved model: who loads it without hfkv meets an error, and
    no random projection.
    """

    def __init__(self, projection: nn.Linear, rank: int) -> None:
        super().__init__()
        place = {"dtype": projection.weight.dtype, "device": projection.weight.device}
        self.in_features, self.out_features = projection.in_features, projection.out_features
        self.down = nn.Linear(self.in_features, rank, bias=False, **place)
        self.up = nn.Linear(rank, self.out_features, bias=projection.bias is not None, **place)
        self.register_buffer("weight", torch.empty(0, **place))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``[batch, tokens, out_features]``; zeros without storage where a cache takes the latents in their place."""
        latents = self.down(hidden_states)
        exchange = _current.get()
        if exchange is None or not exchange.takes(self, latents):
            states: torch.Tensor = self.up(latents)
            return states
        return hidden_states.new_zeros(()).expand(*hidden_states.shape[:-1], self.out_features)


# the attention that runs in this thread, if it has a cache
_current: ContextVar[_Exchange | None] = ContextVar("hfkv_latent", default=None)


def _enter(attention: Any, args: Any, kwargs: dict[str, Any], *, rotary: Any, rotate: Rotate, is_first: bool) -> Any:
    """Stand in for the cache of an attention that is about to run."""
    name = next((name for name in ("cache", "past_key_values") if kwargs.get(name) is not None), None)
    if name is None or not isinstance(attention.k_proj, LatentProjection):
        _current.set(None)
        return None
    if not isinstance(kwargs[name], Cache):
        raise NotImplementedError(
            f"{type(kwargs[name]).__name__} stores keys and values alone: there is no continuous batching for latents. "
            "Fix: generate"
        )
    positions = kwargs.get("position_ids")
    if positions is None:
        raise NotImplementedError(
            f"{type(attention).__name__} was not given position_ids, by which keys made of latents are turned"
        )
    exchange = _Exchange(attention, kwargs[name], positions, rotary, rotate, is_first)
    _current.set(exchange)
    return args, {**kwargs, name: exchange}


class _Exchange:
    """What attention takes for its cache: latents are stored, and keys and values come out.

    Attributes
    ----------
    cache
        The model's own.
    """

    def __init__(
        self, attention: Any, cache: Any, positions: torch.Tensor, rotary: Any, rotate: Rotate, is_first: bool
    ) -> None:
        self.cache = cache
        self._attention, self._positions, self._is_first = attention, positions, is_first
        self._rotary, self._rotate = rotary, rotate
        self._latents: dict[str, torch.Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)

    def takes(self, projection: LatentProjection, latents: torch.Tensor) -> bool:
        """Keep the latents of the attention that this stands in for; other projections are told no."""
        for name in PROJECTIONS:
            if projection is getattr(self._attention, name):
                self._latents[name] = latents
                return True
        return False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the tokens' latents, and make the keys and values of all tokens."""
        _current.set(None)
        new = (self._latents.pop(name)[:, None] for name in PROJECTIONS)
        stored = self.cache.update(*new, layer_idx, *args, **kwargs)
        if isinstance(stored[0], WindowHandle):
            raise NotImplementedError(
                "this cache drops tokens in the middle or shows each query others, and keys made of latents are turned "
                "by the positions of neighbours. Fix: a cache without a window, e.g. 'kivi' without window_length"
            )
        # a packed cache hands out all tokens, dequantized
        keys, values = (self._up(name, states[:, 0]) for name, states in zip(PROJECTIONS, stored, strict=True))
        queries, length = key_states.shape[2], keys.shape[1]
        before = int(self.cache.get_seq_length(layer_idx)) - queries
        if self._is_first:
            check_neighbours(self.cache, self._positions, before)
        # those of a window are the newest; a cache of fixed size has room behind them
        past = before - max(0, before + queries - length)
        options = {"layer_type": self._attention.layer_type} if hasattr(self._rotary, "layer_types") else {}
        cos, sin = turns(self._rotary, keys, self._positions, past, self._is_first, options)
        return self._turned(self._by_heads(keys, key_states), cos, sin), self._by_heads(values, value_states)

    def _up(self, name: str, latents: torch.Tensor) -> torch.Tensor:
        """``[batch, tokens, heads * head_dim]``, before norms of single heads."""
        states: torch.Tensor = getattr(self._attention, name).up(latents)
        norm = getattr(self._attention, "k_norm", None) if name == "k_proj" else None
        if norm is None:
            return states
        # over all heads, or over each
        size = norm.weight.shape[-1]
        return norm(states.unflatten(-1, (-1, size))).flatten(-2)  # type: ignore[no-any-return]

    def _turned(self, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        # in some models the first channels of a head alone
        channels = cos.shape[-1]
        part, rest = keys[..., :channels], keys[..., channels:]
        # no query is turned: it has no heads
        turned = self._rotate(part[:, :0], part, cos, sin)[1]
        return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned

    def _by_heads(self, states: torch.Tensor, alike: torch.Tensor) -> torch.Tensor:
        return states.unflatten(-1, (alike.shape[1], alike.shape[3])).transpose(1, 2)
