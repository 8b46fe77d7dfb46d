"""Read the text, choose scales, ranges and outlier features, and fold the scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.utils.logging import tqdm

from hfkv.weights import RoundedLinear

from .calibration import Moments, batches, record, texts
from .folds import Shared, own_inputs, shared_inputs
from .search import Round, best_scale, best_share, clipped


@dataclass(frozen=True)
class Found:
    """What the search found for one layer.

    Attributes
    ----------
    features
        Its outlier features, or None.
    share
        How much of each group's largest magnitude is kept ``[outputs, groups]``, or None for all.
    group
        Inputs of a group.
    scale
        What the layer divides its input by ``[inputs]``, or None where that is folded.
    """

    features: torch.Tensor | None
    share: torch.Tensor | None
    group: int
    scale: torch.Tensor | None = None

    def fit(self, weight: torch.Tensor) -> torch.Tensor:
        """What is rounded of a weight ``[outputs, inputs]``: times the scale, within its ranges, outliers aside."""
        if self.scale is not None:
            weight = weight * self.scale
        if self.share is None:
            return weight
        if self.features is None:
            return clipped(weight, self.share, self.group)
        result = clipped(weight.index_fill(1, self.features, 0), self.share, self.group)
        return result.index_copy_(1, self.features, weight[:, self.features])


class _Layer:
    """One layer to quantize, while the search goes on."""

    def __init__(self, name: str, linear: nn.Linear, empty: RoundedLinear) -> None:
        self.name, self.linear, self.empty = name, linear, empty
        self.features: torch.Tensor | None = None
        self.scale: torch.Tensor | None = None

    @property
    def weight(self) -> torch.Tensor:
        """``[outputs, inputs]`` float32: times the scale that is kept, outlier features aside."""
        weight = self.linear.weight.detach().float()
        weight = weight if self.scale is None else weight * self.scale
        return weight if self.features is None else weight.index_fill(1, self.features, 0)

    @property
    def round(self) -> Round:
        """What rounds the weight; nothing is lost of an outlier feature."""
        features = self.features

        def rounded(weight: torch.Tensor) -> torch.Tensor:
            result = self.empty.approximate(weight)
            return result if features is None else result.index_fill(1, features, 0)

        return rounded

    def split(self, count: int, moments: Moments) -> None:
        """Choose the features whose rounding adds most to the output's error."""
        if count:
            weight = self.weight
            error = (self.round(weight) - weight).square().sum(0) * moments.gram.diagonal()
            self.features = error.topk(count).indices.sort().values


@torch.no_grad()
def calibrate(model: Any, layer_class: Any, targets: Mapping[str, Any]) -> dict[str, Found]:
    """Scale a model's layers for a text; the model computes what it did.

    An input is divided only where all layers that read it, and the layer whose rows are divided for it, are targets
    whose scales are folded; or else in the layer, where its options say ``fold=False``.

    Returns
    -------
    dict
        What the search found, by the name of the layer. Layers outside the decoder's have none.
    """
    folded = {name: options for name, options in targets.items() if options.fold}
    kept = {name: options for name, options in targets.items() if not options.fold}
    groups = own_inputs(model, kept)
    if folded:
        groups += [group for group in shared_inputs(model) if any(name in folded for name in group.linears)]
    if not groups:
        return {}
    pieces = texts(model, next(iter(targets.values())))
    readers: list[Any] = [model.get_submodule(group.linears[0]) for group in groups]
    runs = list(batches(readers))
    found: dict[str, Found] = {}
    with tqdm(total=len(runs) * len(pieces) + len(groups), desc="Calibrating weights") as bar:
        for run in runs:
            for group, moments in zip(groups[run], record(model, readers[run], pieces, bar.update), strict=True):
                among = kept if group.kept else folded
                layers = [_layer(model, name, layer_class, among[name]) for name in group.linears if name in among]
                found.update(_search(group, layers, moments, among))
                bar.update()
    return found


def _layer(model: Any, name: str, layer_class: Any, options: Any) -> _Layer:
    linear = model.get_submodule(name)
    size = (linear.in_features, linear.out_features)
    return _Layer(name, linear, layer_class(*size, options, dtype=linear.weight.dtype, device="meta"))


def _search(group: Shared, layers: list[_Layer], moments: Moments, targets: Mapping[str, Any]) -> dict[str, Found]:
    gram = moments.gram
    for layer in layers:
        layer.split(getattr(layer.empty, "features", 0), moments)
    whole = all(name in targets for name in (*group.linears, *([group.writer] if group.writer else ())))
    if whole:
        scale = best_scale(
            [layer.weight for layer in layers], [layer.round for layer in layers], moments, group.source.shared
        )
        scale = group.source.divide(scale)
        for layer in layers:
            if group.kept:
                layer.scale = scale
            else:
                layer.linear.weight.copy_(layer.linear.weight.float() * scale)
        gram = gram / scale / scale[:, None]
    return {layer.name: _clip(layer, gram) for layer in layers}


def _clip(layer: _Layer, gram: torch.Tensor) -> Found:
    grid = layer.empty.grid
    group = layer.linear.in_features if grid.per_tensor else grid.group
    share = best_share(layer.weight, layer.round, gram, group) if layer.empty.options.clip else None
    return Found(layer.features, share, group, layer.scale)
