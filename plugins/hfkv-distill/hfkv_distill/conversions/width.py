"""Narrower layers: hidden channels, neurons and heads that a text shows to carry least are cut out.

Muralidharan et al., "Compact Language Models via Pruning and Knowledge Distillation", 2024 (Minitron).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from .decoder import layer_and_name, layer_prefix, layers_of, rebuild
from .importance import Importance, hidden_norms, importance

# sizes are rounded to it, so that products of matrices keep whole tiles
MULTIPLE = 16
HIDDEN, NEURONS, HEADS, KV, KEEP = "hidden", "neurons", "heads", "kv", "keep"
# what the dimensions of each weight are; biases are their first one
_DIMENSIONS = {
    "q_proj": (HEADS, HIDDEN),
    "k_proj": (KV, HIDDEN),
    "v_proj": (KV, HIDDEN),
    "o_proj": (HIDDEN, HEADS),
    "gate_proj": (NEURONS, HIDDEN),
    "up_proj": (NEURONS, HIDDEN),
    "down_proj": (HIDDEN, NEURONS),
    "embed_tokens": (KEEP, HIDDEN),
    "lm_head": (KEEP, HIDDEN),
}


@dataclass(frozen=True)
class Sizes:
    """The sizes of a decoder, by the names of its config."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int


def prune_width(model: PreTrainedModel, width: float, input_ids: torch.Tensor) -> Any:
    """The model with about ``width`` of its hidden channels, neurons and heads, each the most important ones.

    Heads go by KV head, with all queries that read it. A norm's gain is set so that what is left keeps, on average over
    the text, the size that it had: to cut channels that are zero changes nothing.

    Parameters
    ----------
    width
        More than 0, less than 1.
    input_ids
        ``[rows, tokens]`` of text that is like what the model will read.

    Raises
    ------
    ValueError
        A width that cuts nothing or everything.
    NotImplementedError
        Weights that are neither attention, a gated MLP, RMS norms nor embeddings.
    """
    if not 0 < width < 1:
        raise ValueError(f"width={width!r} must be more than 0 and less than 1, e.g. 0.75")
    before = _sizes(model)
    after = rounded(before, width)
    if after == before:
        raise ValueError(
            f"width={width!r} cuts nothing: the sizes {before} are rounded to themselves. Fix: a smaller one"
        )
    _check(model, before.head_dim)
    found = importance(model, input_ids, before.num_key_value_heads)
    cut = _Cut(model, found, before, after)
    weights = {name: cut(name, tensor) for name, tensor in model.state_dict().items()}
    result = rebuild(model, weights, vars(after))
    _set_gains(model, result, found, cut.hidden)
    _set_embedding_scale(model, result)
    return result


def rounded(before: Sizes, width: float) -> Sizes:
    """The sizes at a width: whole KV heads, and the rest in multiples that the architecture takes."""
    kv_heads = max(1, round(before.num_key_value_heads * width))
    heads = before.num_attention_heads // before.num_key_value_heads * kv_heads
    return Sizes(
        # transformers' configs want a hidden size that the heads divide, whatever the size of a head
        _nearest(before.hidden_size, width, math.lcm(MULTIPLE, heads)),
        _nearest(before.intermediate_size, width, MULTIPLE),
        heads,
        kv_heads,
        before.head_dim,
    )


def _nearest(size: int, width: float, multiple: int) -> int:
    return min(size, max(1, round(size * width / multiple)) * multiple)


def _sizes(model: PreTrainedModel) -> Sizes:
    config: Any = model.config
    attention: Any = layers_of(model)[0].self_attn
    heads = config.num_attention_heads
    return Sizes(
        config.hidden_size,
        config.intermediate_size,
        heads,
        getattr(config, "num_key_value_heads", None) or heads,
        attention.q_proj.out_features // heads,
    )


def _check(model: PreTrainedModel, head_dim: int) -> None:
    norms = {name for name, _ in hidden_norms(model)}
    for name, tensor in model.state_dict().items():
        module, _, kind = name.rpartition(".")
        part = module.rpartition(".")[2]
        if name in norms or (part in _DIMENSIONS and kind in ("weight", "bias")):
            continue
        if part in ("q_norm", "k_norm") and tensor.numel() == head_dim:
            continue
        raise NotImplementedError(
            f"{type(model).__name__} has {name} {tuple(tensor.shape)}, and it is not known which of its channels go "
            f"with which of the others. Known: {', '.join(_DIMENSIONS)}, RMS norms, norms of single heads"
        )


class _Cut:
    """Takes out of each weight what stays of it.

    Attributes
    ----------
    hidden
        The hidden channels that stay, the same in all layers.
    """

    def __init__(self, model: PreTrainedModel, found: Importance, before: Sizes, after: Sizes) -> None:
        self._prefix = layer_prefix(model)
        self.hidden = _best(found.hidden, after.hidden_size)
        self._neurons = [_best(each, after.intermediate_size) for each in found.neurons]
        groups = [_best(each, after.num_key_value_heads) for each in found.groups]
        per_group = before.num_attention_heads // before.num_key_value_heads * before.head_dim
        self._heads = [_channels(each, per_group) for each in groups]
        self._kv = [_channels(each, before.head_dim) for each in groups]

    def __call__(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        index, _ = layer_and_name(self._prefix, name)
        part = name.split(".")[-2]
        if part in ("q_norm", "k_norm"):
            return tensor
        for dimension, what in enumerate(_DIMENSIONS.get(part, (HIDDEN,))[: tensor.dim()]):
            if what != KEEP:
                tensor = tensor.index_select(dimension, self._kept(what, index).to(tensor.device))
        return tensor

    def _kept(self, what: str, layer: int | None) -> torch.Tensor:
        if what == HIDDEN or layer is None:
            return self.hidden
        return {NEURONS: self._neurons, HEADS: self._heads, KV: self._kv}[what][layer]


def _best(importance: torch.Tensor, count: int) -> torch.Tensor:
    return importance.topk(count).indices.sort().values


def _channels(groups: torch.Tensor, size: int) -> torch.Tensor:
    return (groups[:, None] * size + torch.arange(size)).flatten()


@torch.no_grad()
def _set_gains(model: PreTrainedModel, result: Any, found: Importance, hidden: torch.Tensor) -> None:
    """Give each norm the gain by which what is left of its input comes out as large as before."""
    before = model.config.hidden_size
    for name, norm in hidden_norms(result):
        energy = found.energy[name]
        share = float(energy[hidden].sum() / energy.sum()) if float(energy.sum()) > 0 else 1.0
        _scale_gain(norm, math.sqrt(share * before / len(hidden)))


@torch.no_grad()
def _set_embedding_scale(model: PreTrainedModel, result: Any) -> None:
    """Undo a factor on the embeddings that depends on the number of hidden channels, as Gemma's."""
    factor = _embedding_scale(model) / _embedding_scale(result)
    if factor == 1:
        return
    result.get_input_embeddings().weight.mul_(factor)
    if result.get_output_embeddings().weight is result.get_input_embeddings().weight:
        # tied: the last norm makes up for it at the output
        _scale_gain(hidden_norms(result)[-1][1], 1 / factor)


def _embedding_scale(model: Any) -> float:
    embedding = model.get_input_embeddings()
    token = embedding.weight.float().norm(dim=1).argmax()[None]
    return float(embedding(token).float().norm() / embedding.weight[token].float().norm())


def _scale_gain(norm: Any, factor: float) -> None:
    weight = norm.weight
    # some norms multiply by their weight, others by one more: their answer to ones says which
    offset = float((norm(torch.ones_like(weight)) - weight).float().mean().round())
    weight.copy_(((weight.float() + offset) * factor - offset).to(weight.dtype))
