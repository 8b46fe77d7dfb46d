"""Fewer KV heads: each new one is the mean of a group of old ones.

Ainslie et al., "GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints", 2023.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from .decoder import layer_and_name, layer_prefix, layers_of, rebuild

# what has a row for each channel of each KV head; norms of single heads have not
_PER_HEAD = tuple(f"self_attn.{part}.{kind}" for part in ("k_proj", "v_proj", "k_norm") for kind in ("weight", "bias"))


def merge_kv_heads(model: PreTrainedModel, kv_heads: int) -> Any:
    """The model with ``kv_heads`` heads of keys and values, each the mean of as many neighbours.

    Raises
    ------
    ValueError
        Not a proper divisor of the model's KV heads.
    """
    attention: Any = layers_of(model)[0].self_attn
    heads = model.config.num_attention_heads
    before = getattr(model.config, "num_key_value_heads", None) or heads
    allowed = [number for number in range(1, before) if before % number == 0]
    if kv_heads not in allowed:
        choices = f"must be one of {allowed}" if allowed else "cannot be fewer"
        raise ValueError(f"kv_heads={kv_heads!r}: the model has {before} KV heads, and the new number {choices}")
    channels = attention.k_proj.out_features
    weights = {}
    for name, tensor in model.state_dict().items():
        _, rest = layer_and_name(layer_prefix(model), name)
        if rest in _PER_HEAD and tensor.shape[0] == channels:
            tensor = _mean_of_groups(tensor, before, kv_heads)
        weights[name] = tensor
    return rebuild(model, weights, {"num_key_value_heads": kv_heads})


def _mean_of_groups(tensor: torch.Tensor, before: int, after: int) -> torch.Tensor:
    """From ``[before * head_dim, ...]`` to ``[after * head_dim, ...]``."""
    grouped = tensor.float().reshape(after, before // after, -1, *tensor.shape[1:])
    return grouped.mean(dim=1).flatten(0, 1).to(tensor.dtype)
