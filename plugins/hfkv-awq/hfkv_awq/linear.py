"""Activation-aware weights: scaled and clipped for a calibration text, then rounded; a few features may keep 16 bits.

Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration", 2023. Splitting off the
features that cost most is of Dettmers et al., "LLM.int8()", 2022, and "SpQR", 2023.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Self

import torch
from torch import nn

from hfkv.weights import RoundedLinear
from hfkv.weights.linear import Layout

from .calibrate import Found, calibrate
from .folds import KEPT_DTYPE
from .options import AwqOptions


class AwqLinear(RoundedLinear):
    """A rounded weight whose columns were scaled, and whose groups were clipped, for the inputs of a text.

    The scales are folded into the layers before. Stored besides codes and scales: where the layer divides its input
    itself, ``input_scale`` ``[in_features]`` bfloat16; for outlier features, ``outlier_index`` ``[features]`` int32 and
    ``outlier_weight`` ``[out_features, features]`` float16, which take 16 bits per weight of theirs more.
    """

    Options = AwqOptions
    backend = "awq"
    whole_model = True
    options: AwqOptions
    outlier_index: torch.Tensor
    outlier_weight: torch.Tensor
    input_scale: torch.Tensor
    # what the search found, while the layer is made
    _found: Found | None = None

    @classmethod
    def convert(cls, model: nn.Module, targets: Mapping[str, Any]) -> Iterator[tuple[str, Self]]:
        """Scale the model's layers for the text, then make each from what the search found."""
        return cls._made(model, targets, calibrate(model, cls, targets))

    @classmethod
    def _made(
        cls, model: nn.Module, targets: Mapping[str, Any], found: Mapping[str, Found]
    ) -> Iterator[tuple[str, Self]]:
        for name, options in targets.items():
            linear: Any = model.get_submodule(name)
            size = (linear.in_features, linear.out_features)
            layer = cls(*size, options, dtype=linear.weight.dtype, bias=linear.bias, device="meta")
            weight = linear.weight.detach()
            if name in found:
                layer._found = found[name]
                weight = found[name].fit(weight.float())
            layer.store(weight)
            layer._found = None
            yield name, layer.train(linear.training)

    @property
    def features(self) -> int:
        """How many input features are split off."""
        return min(self.options.outlier_features, self.in_features)

    def layout(self) -> Layout:
        """Shape and dtype of what is stored."""
        result = dict(super().layout())
        if not self.options.fold:
            result["input_scale"] = ((self.in_features,), KEPT_DTYPE)
        if self.features:
            result["outlier_index"] = ((self.features,), torch.int32)
            result["outlier_weight"] = ((self.out_features, self.features), torch.float16)
        return result

    def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Codes, scale and offset of what is not split off, and the rest as it is; the weight is multiplied already."""
        stored = self._split(weight) if self.features else super().encode(weight)
        if not self.options.fold:
            scale = None if self._found is None else self._found.scale
            # no text reached the layer
            scale = weight.new_ones(self.in_features) if scale is None else scale
            stored["input_scale"] = scale.to(weight.device, KEPT_DTYPE)
        return stored

    def _split(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        index = None if self._found is None else self._found.features
        if index is None:
            # no text says which inputs are large: those that meet the largest weights
            index = weight.float().square().sum(0).topk(self.features).indices.sort().values
        index = index.to(weight.device)
        stored = super().encode(weight.index_fill(1, index, 0))
        return {**stored, "outlier_index": index.int(), "outlier_weight": weight[:, index].half()}

    def decode(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight for inputs as they are, with the features that were split off in their places."""
        weight = super().decode(dtype if self.options.fold else torch.float32)
        if self.features:
            weight[:, self.outlier_index.long()] = self.outlier_weight.to(weight.dtype)
        return weight if self.options.fold else weight.div_(self.input_scale).to(dtype)

    def matmul(self, states: torch.Tensor) -> torch.Tensor:
        """The product with what is packed, and that with the features that were split off."""
        if not self.options.fold:
            states = states / self.input_scale.to(states.dtype)
        if not self.features:
            return super().matmul(states)
        index = self.outlier_index.long()
        output = super().matmul(states.index_fill(1, index, 0))
        return output.addmm_(states[:, index], self.outlier_weight.to(states.dtype).T)

    def path(self) -> str:
        """Which product computes few rows, and what is beside it."""
        divided = "; the input is divided in the layer" if not self.options.fold else ""
        return super().path() + divided + (f"; {self.features} features in 16 bits" if self.features else "")
