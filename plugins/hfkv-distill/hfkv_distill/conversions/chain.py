"""Several conversions of one model, in the order in which each finds what it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from .depth import choose_layers, drop_layers
from .kv_heads import merge_kv_heads
from .latents import compress_latents
from .local import make_local
from .sharing import share_layers
from .width import prune_width


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What is to be converted; what is None stays as it is.

    Parameters
    ----------
    drop_layers
        How many layers to drop.
    drop_by
        How those are chosen: ``"influence"`` or ``"kl"``, as in `choose_layers`.
    width
        The share of hidden channels, neurons and heads that stay.
    kv_heads
        KV heads, each the mean of several.
    local
        How many layers with a window, and how many without after them.
    window
        Tokens that a layer with a window sees.
    latent_rank
        Numbers that stand for a token's keys of all heads, and as many for its values.
    share_layers
        How many layers share one set of keys and values, or lists of layers.
    share_map
        Which layers a number stands for: ``"neighbours"``, or ``"similar"``, measured.
    """

    drop_layers: int | None = None
    drop_by: str = "influence"
    width: float | None = None
    kv_heads: int | None = None
    local: tuple[int, int] | None = None
    window: int = 512
    latent_rank: int | None = None
    share_layers: int | Sequence[Sequence[int]] | None = None
    share_map: str = "neighbours"


def convert(
    model: PreTrainedModel,
    conversion: Conversion,
    input_ids: torch.Tensor,
    say: Callable[[str], None] = lambda text: None,
) -> Any:
    """The converted model: fewer layers, then narrower ones, then fewer KV heads, windows, latents, sharing.

    Parameters
    ----------
    input_ids
        ``[rows, tokens]`` of text that decides what is cut.
    say
        Called with each conversion before it is made.

    Raises
    ------
    ValueError
        Nothing is to be converted, or a number that the model does not allow.
    NotImplementedError
        An architecture that a conversion does not know.
    """
    steps = list(_steps(conversion, input_ids))
    if not steps:
        raise ValueError(
            "nothing is to be converted. Fix: one of drop_layers, width, kv_heads, local, latent_rank, share_layers"
        )
    result: Any = model
    for words, change in steps:
        say(words)
        result = change(result)
    return result


def _steps(asked: Conversion, ids: torch.Tensor) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    if asked.drop_layers is not None:
        words = f"dropping {asked.drop_layers} of the layers, by {asked.drop_by}"
        yield words, partial(_drop, count=asked.drop_layers, by=asked.drop_by, ids=ids)
    if asked.width is not None:
        yield f"cutting the width to {asked.width:g}", partial(prune_width, width=asked.width, input_ids=ids)
    if asked.kv_heads is not None:
        yield f"merging to {asked.kv_heads} KV heads", partial(merge_kv_heads, kv_heads=asked.kv_heads)
    if asked.local is not None:
        local, full = asked.local
        words = f"windows of {asked.window} tokens in {local} of {local + full} layers"
        yield words, partial(make_local, local=local, full=full, window=asked.window)
    if asked.latent_rank is not None:
        words = f"keys and values through {asked.latent_rank} latents"
        yield words, partial(compress_latents, rank=asked.latent_rank, input_ids=ids)
    if asked.share_layers is not None:
        words = f"sharing keys and values, share_layers={asked.share_layers}"
        yield words, partial(share_layers, groups=asked.share_layers, map=asked.share_map, input_ids=ids)


def _drop(model: PreTrainedModel, count: int, by: str, ids: torch.Tensor) -> Any:
    return drop_layers(model, choose_layers(model, ids, count, by))
