"""Attention of a packed layer: all segments in one softmax, by the kernels that were chosen."""

from __future__ import annotations

from typing import Any

import torch

from .. import kernels
from ..cache.view import KVView


def attend(
    module: Any,
    query: torch.Tensor,
    view: KVView,
    mask: torch.Tensor | None,
    scaling: float | None,
    is_causal: bool | None,
) -> torch.Tensor:
    """What transformers asks of an attention function: ``[batch, queries, heads, value_head_dim]``.

    Raises
    ------
    ValueError
        A mask that does not cover the cache.
    """
    if mask is not None:
        if mask.shape[-1] != view.length:
            raise ValueError(
                f"the attention mask covers {mask.shape[-1]} tokens and the cache holds {view.length}: pass the mask "
                "of all tokens, cached ones included"
            )
        mask = view.arrange(mask)
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output, _ = kernels.attend(query, view, mask, scale=scale, causal=causal)
    return output.transpose(1, 2).contiguous()
