"""A window over the tokens, with sinks before it: what a query sees, and what attention is handed of it.

Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023: the first tokens collect attention
whatever they say, so a window that keeps them goes on for ever, at positions counted within what is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from .layer import LayerContext
from .packed import PackedBlocks
from .padding import Padding
from .rotary import Rotation, UnknownRotation, find_rotation
from .view import KVView

# tokens behind the window that stay while a crop may come: more than any draft that is taken back
RECORDED = 256
# where sinks can stand: right before the window, or where they came
POSITIONS = ("cache", "absolute")


@dataclass(frozen=True)
class Window:
    """Each query sees the first ``sink_length`` real tokens of its row and the newest ``length``, itself included.

    Attributes
    ----------
    rotation
        How the model turns a query, where the sinks stand right before the window; None where they stay in their place.
    """

    length: int
    sink_length: int = 0
    rotation: Rotation | UnknownRotation | None = None

    def hides(self, seen: int) -> bool:
        """Whether the newest of so many tokens sees less than all of them."""
        return seen > self.sink_length + self.length

    def mask_sizes(self, past: int, queries: int) -> tuple[int, int]:
        """Length and offset of the columns that the model's mask needs for these queries; sinks need none."""
        before = min(past, self.length - 1) if self.hides(past + queries) else past
        return before + queries, past - before

    def kept(self, seen: int) -> int:
        """How many of so many tokens can still be attended to."""
        return min(seen, self.sink_length + self.length)

    def pattern(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`KVLayer.attended` of a window."""
        query, token = torch.arange(length)[:, None], torch.arange(length)
        is_sink = token < self.sink_length
        visible = (token <= query) & (is_sink | (token > query - self.length))
        dropped = (query + 1 - self.length - self.sink_length).clamp_min(0)
        nearer = dropped if self.rotation is not None else torch.zeros_like(dropped)
        return visible, nearer * is_sink


def make_window(context: LayerContext, *, length: int, sink_length: int = 0, positions: str = "absolute") -> Window:
    """The window of a layer; ``positions`` is one of `POSITIONS`.

    Raises
    ------
    NotImplementedError
        ``positions="cache"`` for a model without a rotary embedding.
    """
    if positions == "absolute" or sink_length == 0:
        return Window(length, sink_length)
    if context.model is None:
        return Window(length, sink_length, UnknownRotation(context.technique))
    return Window(length, sink_length, find_rotation(context.model, context.layer_idx))


@dataclass(frozen=True)
class WindowView:
    """What attention reads of a windowed layer, for one forward.

    Attributes
    ----------
    seen
        Tokens that the layer has seen, those of this forward (the newest) included.
    sink_keys, sink_values
        ``[batch, kv_heads, sink_length, head_dim]``: each row's first real tokens; a slot whose token has not come yet
        holds anything.
    body
        The other tokens in token order: dense keys and values, or packed blocks followed by exact tokens.
    first
        The token that the body starts with.
    left
        ``[batch]`` long, padding on the left of each row, at most ``longest``; None where there is none.
    padding
        What the cache knows of the batch's padding.
    """

    window: Window
    seen: int
    sink_keys: torch.Tensor
    sink_values: torch.Tensor
    body: KVView | tuple[torch.Tensor, torch.Tensor]
    first: int
    left: torch.Tensor | None
    longest: int
    padding: Padding

    @staticmethod
    def of(
        window: Window,
        keys: torch.Tensor,
        values: torch.Tensor,
        packed: tuple[PackedBlocks, PackedBlocks] | None,
        seen: int,
        dropped: int,
        order: torch.Tensor | None,
        is_ordered: bool,
        padding: Padding,
    ) -> WindowView:
        """A view of ``[sinks | packed | exact]``.

        ``order`` is that of the first tokens (`Padding.order`), and ``is_ordered`` says whether the tensors have it
        already; until then all tokens stand as they came.
        """
        sinks = window.sink_length
        apart = [states[:, :, :sinks] for states in (keys, values)]
        if order is not None and not is_ordered:
            # what stands in the slot of a sink that has not come yet is never seen
            index = order[:, None, :sinks, None].clamp(max=keys.shape[2] - 1)
            apart = [
                states.gather(2, index.expand(*states.shape[:2], -1, states.shape[3])) for states in (keys, values)
            ]
        keys, values = keys[:, :, sinks:], values[:, :, sinks:]
        body = (keys, values) if packed is None else KVView.of(keys, values, 0, *packed)
        left = None if order is None else order[:, 0]
        longest = 0 if order is None else order.shape[1] - sinks
        return WindowView(window, seen, apart[0], apart[1], body, sinks + dropped, left, longest, padding)

    def visible(self, queries: range, tokens: range, device: torch.device) -> torch.Tensor | None:
        """Which of the body's tokens each query sees: ``[batch or 1, 1, queries, tokens]``, or None for all."""
        sinks = self.window.sink_length
        is_padded = self.left is not None and tokens.start < self.longest + sinks
        oldest = queries.stop - self.window.length
        if len(queries) == 1 and tokens.start >= oldest and tokens.stop <= queries.stop and not is_padded:
            return None
        query = torch.arange(queries.start, queries.stop, device=device)[:, None]
        token = torch.arange(tokens.start, tokens.stop, device=device)
        seen = ((token <= query) & (token > query - self.window.length))[None, None]
        if self.left is not None and is_padded:
            # padding, and the row's sinks, which are attended to apart
            seen = seen & (token >= (self.left + sinks)[:, None, None, None])
        return seen

    def visible_sinks(self, queries: range, device: torch.device) -> torch.Tensor | None:
        """Which sinks each query sees: ``[batch or 1, 1, queries, sink_length]``, or None for all."""
        if queries.start >= self.longest + self.window.sink_length - 1:
            return None
        query = torch.arange(queries.start, queries.stop, device=device)[:, None]
        return self.sink_tokens(device)[:, None, None] <= query

    def sink_tokens(self, device: torch.device) -> torch.Tensor:
        """Where the sinks stand: ``[batch or 1, sink_length]``."""
        slots = torch.arange(self.window.sink_length, device=device)[None]
        return slots if self.left is None else slots + self.left[:, None]

    def expanded(self, expand: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> WindowView:
        """The same tokens, with the keys and values that a model makes of what is stored: its latents."""
        body = (self.body.dense("keys"), self.body.dense("values")) if isinstance(self.body, KVView) else self.body
        sinks = self.sink_keys, self.sink_values
        keys, values = expand(*(torch.cat(parts, dim=2) for parts in zip(sinks, body, strict=True)))
        count = self.window.sink_length
        return replace(
            self,
            sink_keys=keys[:, :, :count],
            sink_values=values[:, :, :count],
            body=(keys[:, :, count:], values[:, :, count:]),
        )

    def moved(self, query: torch.Tensor, queries: range) -> torch.Tensor:
        """The queries as the sinks see them: behind by as many positions as there are dropped tokens in between."""
        window = self.window
        if window.rotation is None or not window.hides(queries.stop):
            return query
        stop = torch.arange(queries.start, queries.stop, device=query.device) - (window.length - 1)
        start = self.sink_tokens(query.device)[:, -1:] + 1
        return window.rotation.move(query, -self.padding.count(start, stop[None]).clamp_min(0))


class WindowHandle(torch.Tensor):
    """The keys or the values of a `WindowView`, with the shape that all tokens would have; only attention reads it."""

    snapshot: WindowView

    @staticmethod
    def __new__(cls, view: WindowView, part: Literal["keys", "values"]) -> WindowHandle:
        """A tensor without storage."""
        sinks: torch.Tensor = getattr(view, f"sink_{part}")
        batch, heads, _, head_dim = sinks.shape
        return torch.Tensor._make_wrapper_subclass(
            cls, (batch, heads, view.seen, head_dim), dtype=sinks.dtype, device=sinks.device
        )

    def __init__(self, view: WindowView, part: Literal["keys", "values"]) -> None:
        self.snapshot = view

    def __repr__(self) -> str:  # type: ignore[override]
        return f"WindowHandle(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(
            f"{func} on the keys or values of a windowed cache, where most tokens are gone and each query sees others. "
            "Only attention that goes through transformers' AttentionInterface can read them, with hfkv active; a "
            "model whose attention is its own takes no windows, and one that caches latents those of a cache that was "
            "made for it: hfkv.make_cache(name, model)"
        )
