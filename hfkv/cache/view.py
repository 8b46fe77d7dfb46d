"""What attention reads: a snapshot of one layer's segments, and the tensor-like handle that stands for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch

from .. import kernels
from .packed import PackedBlocks, WithPrepared


@dataclass(frozen=True, eq=False)
class ExactBuffers(WithPrepared):
    """Tensors of full-precision tokens, with room for more: written once, in token order.

    Attributes
    ----------
    keys, values
        ``[batch, kv_heads, room, head_dim]``.
    """

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class KVView:
    """The keys and values of one layer, for one forward.

    Stored order is ``[sink | packed | residual]``; the sink and the residual are one full-precision tensor.

    Attributes
    ----------
    exact
        The buffers of the full-precision tokens, in the model's dtype.
    exact_length
        How many of them there are, sink and residual: the first ones of the buffers, the current forward's last.
    sink
        How many of the exact tokens come before the packed ones.
    keys, values
        The packed blocks in between, at least one.
    order
        ``[batch, slots]`` long: the token at each of the first stored slots, where left padding moved the sinks to
        the front; the other slots, and all where it is None, hold their own token.
    """

    exact: ExactBuffers
    exact_length: int
    sink: int
    keys: PackedBlocks
    values: PackedBlocks
    order: torch.Tensor | None = None

    @staticmethod
    def of(
        exact_keys: torch.Tensor,
        exact_values: torch.Tensor,
        sink: int,
        keys: PackedBlocks,
        values: PackedBlocks,
        order: torch.Tensor | None = None,
    ) -> KVView:
        """A view whose exact tokens are all of these: ``[batch, kv_heads, sink + residual, head_dim]``."""
        return KVView(ExactBuffers(exact_keys, exact_values), exact_keys.shape[2], sink, keys, values, order)

    # made for who asks: kernels that read the buffers spare each step two views
    @cached_property
    def exact_keys(self) -> torch.Tensor:
        """``[batch, kv_heads, sink + residual, head_dim]``."""
        return self.exact.keys.narrow(2, 0, self.exact_length)

    @cached_property
    def exact_values(self) -> torch.Tensor:
        """``[batch, kv_heads, sink + residual, head_dim]``."""
        return self.exact.values.narrow(2, 0, self.exact_length)

    @property
    def length(self) -> int:
        """Tokens, of all segments."""
        return self.keys.length + self.exact_length

    def coarse(self) -> KVView:
        """The same tokens, of hierarchical codes the upper halves alone."""
        return replace(self, keys=self.keys.upper_half, values=self.values.upper_half)

    def dense(self, name: Literal["keys", "values"]) -> torch.Tensor:
        """``[batch, kv_heads, tokens, head_dim]`` in full precision, in token order."""
        exact: torch.Tensor = getattr(self, f"exact_{name}")
        packed = kernels.unpack(getattr(self, name), exact.dtype)
        return in_token_order(
            torch.cat([exact[:, :, : self.sink], packed, exact[:, :, self.sink :]], dim=2), self.order
        )

    def arrange(self, mask: torch.Tensor) -> torch.Tensor:
        """A mask ``[..., query, tokens]``, its columns moved from token order to stored order."""
        if self.order is None:
            return mask
        slots = self.order.shape[1]
        index = self.order[:, None, None, :].expand(-1, *mask.shape[1:-1], -1)
        front = mask[..., :slots].expand(index.shape[0], *mask.shape[1:-1], slots)
        rest = mask[..., slots:].expand(index.shape[0], *mask.shape[1:-1], -1)
        return torch.cat([front.gather(-1, index), rest], dim=-1)


def in_stored_order(states: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """``[batch, heads, tokens, channels]`` from token order to stored order."""
    if order is None:
        return states
    slots = order.shape[1]
    index = order[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
    return torch.cat([states[:, :, :slots].gather(2, index), states[:, :, slots:]], dim=2)


def in_token_order(states: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """The inverse of `in_stored_order`."""
    return states if order is None else in_stored_order(states, order.argsort(dim=1))


class KVHandle(torch.Tensor):
    """The keys or the values of a `KVView`, with the shape, dtype and device of the full-precision tensor.

    Attention that knows hfkv reads ``snapshot``; any other operation sees the dequantized tensor.
    """

    snapshot: KVView
    part: Literal["keys", "values"]

    @staticmethod
    def __new__(cls, view: KVView, part: Literal["keys", "values"]) -> KVHandle:
        """A tensor without storage, of the shape that all segments have together."""
        buffer = view.exact.keys if part == "keys" else view.exact.values
        batch, heads, _, head_dim = buffer.shape
        shape = batch, heads, view.length, head_dim
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=buffer.dtype, device=buffer.device)

    def __init__(self, view: KVView, part: Literal["keys", "values"]) -> None:
        self.snapshot = view
        self.part = part

    def dense(self) -> torch.Tensor:
        """The full-precision tensor."""
        return self.snapshot.dense(self.part)

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"KVHandle({self.part}, shape={tuple(self.shape)}, packed={self.snapshot.keys.length}, dtype={self.dtype})"
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = torch.utils._pytree.tree_map_only(KVHandle, KVHandle.dense, (args, kwargs or {}))
        return func(*args, **kwargs)
