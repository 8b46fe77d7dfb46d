"""What attention reads: a snapshot of one layer's segments, and the tensor-like handle that stands for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from .. import kernels
from .packed import PackedBlocks


@dataclass(frozen=True)
class KVView:
    """The keys and values of one layer, for one forward.

    Stored order is ``[sink | packed | residual]``; the sink and the residual are one full-precision tensor.

    Attributes
    ----------
    exact_keys, exact_values
        ``[batch, kv_heads, sink + residual, head_dim]`` in the model's dtype, the current forward's tokens last.
    sink
        How many of the exact tokens come before the packed ones.
    keys, values
        The packed blocks in between, at least one.
    order
        ``[batch, slots]`` long: the token at each of the first stored slots, where left padding moved the sinks to
        the front; the other slots, and all where it is None, hold their own token.
    """

    exact_keys: torch.Tensor
    exact_values: torch.Tensor
    sink: int
    keys: PackedBlocks
    values: PackedBlocks
    order: torch.Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens, of all segments."""
        return self.keys.length + self.exact_keys.shape[2]

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
        exact = view.exact_keys if part == "keys" else view.exact_values
        batch, heads, tokens, head_dim = exact.shape
        shape = batch, heads, view.keys.length + tokens, head_dim
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=exact.dtype, device=exact.device)

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
