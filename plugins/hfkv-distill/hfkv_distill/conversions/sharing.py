"""Layers that share keys and values: the structure ``"crosslayer"``, asked for by name."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from hfkv import registry
from hfkv.specs import StructureSpec

from .decoder import layers_of

STRUCTURE = "crosslayer"


def share_layers(
    model: PreTrainedModel,
    groups: Sequence[Sequence[int]] | int,
    *,
    map: str = "neighbours",
    input_ids: torch.Tensor | None = None,
) -> Any:
    """The model with groups of layers that share the keys and values of their first one (CLA, Brandon et al., 2024).

    Parameters
    ----------
    groups
        A number of layers for each group, or lists of layers.
    map
        ``"neighbours"``, or ``"similar"``: measured on ``input_ids``.
    input_ids
        ``[rows, tokens]``, for ``map="similar"``.

    Raises
    ------
    ImportError
        hfkv-crosslayer is not installed.
    ValueError
        Groups that the layers do not allow, or layers with latents that are to be compared.
    """
    if STRUCTURE not in registry.manager().specs(StructureSpec):
        raise ImportError(
            "layers share by hfkv-crosslayer, which is not installed. Fix: pip install 'hfkv[crosslayer]'"
        )
    layers_of(model, latents=True)
    if map == "similar" and getattr(model.config, "hfkv", None):
        raise ValueError(
            "map='similar' compares the keys and values that layers store, and this model stores latents, which differ "
            "from layer to layer. Fix: map='neighbours', or lists of layers"
        )
    change = registry.manager().find(StructureSpec, STRUCTURE, "structure").resolve_change()
    return change(copy.deepcopy(model), groups, map=map, input_ids=input_ids)
