"""Latents: keys and values of all heads through a narrow passage, which is what caches then store.

Chang et al., "Palu: Compressing KV-Cache with Low-Rank Projection", 2024. The passage starts as the principal
directions of the keys, or values, that a text brings: of all projections of that rank the one that loses least of them,
values as the output projection reads them. Those of the weights alone lose far more, since what a layer reads is not
even. What the text leaves open, the weights decide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from hfkv.integration import cache_argument

from ..latent import NAME, PROJECTIONS
from .decoder import evaluating, layer_and_name, layer_prefix, layers_of, rebuild, run_watched

# what the weights count beside the text: enough for an order among directions that it never shows
_WEIGHTS = 1e-4
# what every channel of the values counts beside what reads it: no direction is without any weight
_UNREAD = 1e-3
# of the logits: rounding is below, keys that are turned or scaled otherwise are far above
_TOLERANCE = 0.05
# rotary embeddings whose angles change with the length: a stored key would have to keep those of its own time
_CHANGING = ("dynamic", "longrope")


def compress_latents(model: PreTrainedModel, rank: int, input_ids: torch.Tensor) -> Any:
    """The model with keys, and values, that pass through ``rank`` latents, which any cache stores in their place.

    Parameters
    ----------
    rank
        From 1 to KV heads times head_dim, at which nothing is lost.
    input_ids
        ``[rows, tokens]`` of text that is like what the model will read.

    Raises
    ------
    ValueError
        A rank that there is not.
    NotImplementedError
        An architecture that makes other keys of its projection than norm and rotation, or angles that change.
    """
    layers: Any = layers_of(model)
    size = layers[0].self_attn.k_proj.out_features
    if not 1 <= rank <= size:
        raise ValueError(
            f"latent_rank={rank!r}: keys of all heads have {size} channels, and so many latents at most. "
            f"Fix: e.g. {size // 2}"
        )
    kinds = getattr(getattr(model.base_model, "rotary_emb", None), "rope_type", "default")
    for kind in kinds.values() if isinstance(kinds, dict) else (kinds,):
        if kind in _CHANGING:
            raise NotImplementedError(
                f"the angles of this {type(model).__name__} (rope_type={kind!r}) change with the length, and keys made "
                "of latents would all be turned by the newest. Fix: leave out latent_rank"
            )
    shown = _second_moments(model, input_ids)
    prefix, weights = layer_prefix(model), {}
    for name, tensor in model.state_dict().items():
        index, rest = layer_and_name(prefix, name)
        stem, _, kind = name.rpartition(".")
        part = rest.removeprefix("self_attn.").removesuffix(f".{kind}")
        if index is None or part not in PROJECTIONS:
            weights[name] = tensor
        elif kind == "bias":
            weights[f"{stem}.up.bias"] = tensor
        else:
            scale = _readers(layers[index].self_attn) if part == "v_proj" else None
            up, down = _factors(tensor, shown[index, part], rank, scale)
            weights |= {f"{stem}.up.weight": up, f"{stem}.down.weight": down, name: tensor.new_empty(0)}
    result = rebuild(model, weights, {"hfkv": {NAME: {"rank": rank}}})
    _check_cached(result, input_ids)
    return result


def _factors(
    weight: torch.Tensor, shown: torch.Tensor, rank: int, scale: tuple[torch.Tensor, torch.Tensor] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[out, rank]`` and ``[rank, in]``, whose product stands for a weight where it matters.

    ``scale`` is a matrix that makes errors as large as they count, and its inverse.
    """
    wide = weight.double()
    even = wide @ wide.T
    moments = shown + _WEIGHTS * shown.trace() / even.trace().clamp(min=1e-30) * even
    if scale is not None:
        moments = scale[0] @ moments @ scale[0]
    directions = torch.linalg.eigh(moments).eigenvectors[:, -rank:].flip(-1)
    up, down = directions, directions.T
    if scale is not None:
        up, down = scale[1] @ up, down @ scale[0]
    return up.to(weight.dtype), (down @ wide).to(weight.dtype)


def _readers(attention: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """How much errors of the values count, as a symmetric matrix over the channels of all KV heads, and its inverse.

    An error reaches the residual stream through the output projection of each query head that reads the KV head.
    """
    size = attention.head_dim
    weight = attention.o_proj.weight.double()
    blocks = weight.T.unflatten(0, (attention.v_proj.out_features // size, -1, size))
    square = torch.block_diag(*torch.einsum("ghco,ghdo->gcd", blocks, blocks))
    values, vectors = torch.linalg.eigh(square)
    roots = (values.clamp(min=0) + _UNREAD * values.mean()).sqrt()
    return (vectors * roots) @ vectors.T, (vectors / roots) @ vectors.T


def _second_moments(model: PreTrainedModel, input_ids: torch.Tensor) -> dict[tuple[int, str], torch.Tensor]:
    """``[out, out]`` for each layer and projection: what it brings over a text, biases apart."""
    found: dict[tuple[int, str], torch.Tensor] = {}
    handles = []
    layer: Any
    for index, layer in enumerate(layers_of(model)):
        for name in PROJECTIONS:
            handles.append(getattr(layer.self_attn, name).register_forward_hook(_note(found, (index, name))))
    run_watched(model, input_ids, handles)
    return found


def _note(found: dict[tuple[int, str], torch.Tensor], key: tuple[int, str]) -> Callable[..., None]:
    def note(projection: Any, args: Any, output: torch.Tensor) -> None:
        states = output if projection.bias is None else output - projection.bias
        states = states.double().flatten(0, -2)
        found[key] = states.T @ states / len(states)

    return note


def _check_cached(model: Any, input_ids: torch.Tensor) -> None:
    """See that keys and values made of a cache's latents are those of a forward without one."""
    ids = input_ids[:1, :8].to(model.device)
    with evaluating(model):
        expected = model(ids, use_cache=False).logits[:, -1].float()
        cache = DynamicCache(config=model.config)
        for part in ids.split((5, ids.shape[1] - 5), dim=1):
            actual = model(part, **{cache_argument(model): cache}).logits[:, -1].float()
    error = float((actual - expected).norm() / expected.norm().clamp(min=1e-30))
    if not error < _TOLERANCE:
        raise NotImplementedError(
            f"{type(model).__name__} makes other keys and values of its projections than hfkv makes of a cache's "
            f"latents (by k_norm and the rotary embedding): logits are {error:.2g} off. Fix: leave out latent_rank"
        )
