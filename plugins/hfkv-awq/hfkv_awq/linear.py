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
from .options import AwqOptions


class AwqLinear(RoundedLinear):
    """A rounded weight whose columns were scaled, and whose groups were clipped, for the inputs of a text.

    The scales are folded into the layers before. Stored besides codes and scales, for outlier features:
    ``outlier_index`` ``[features]`` int32 and ``outlier_weight`` ``[out_features, features]`` float16, which take 16
    bits per weight of theirs more.
    """

    Options = AwqOptions
    backend = "awq"
    whole_model = True
    options: AwqOptions
    outlier_index: torch.Tensor
    outlier_weight: torch.Tensor
    # the features to split off, while the layer is made
    _chosen: torch.Tensor | None = None

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
                layer._chosen = found[name].features
                weight = found[name].clip(weight.float())
            layer.store(weight)
            layer._chosen = None
            yield name, layer.train(linear.training)

    @property
    def features(self) -> int:
        """How many input features are split off."""
        return min(self.options.outlier_features, self.in_features)

    def layout(self) -> Layout:
        """Shape and dtype of what is stored."""
        result = dict(super().layout())
        if self.features:
            result["outlier_index"] = ((self.features,), torch.int32)
            result["outlier_weight"] = ((self.out_features, self.features), torch.float16)
        return result

    def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Codes, scale and offset of what is not split off, and the rest as it is."""
        if not self.features:
            return super().encode(weight)
        index = self._chosen
        if index is None:
            # no text says which inputs are large: those that meet the largest weights
            index = weight.float().square().sum(0).topk(self.features).indices.sort().values
        index = index.to(weight.device)
        stored = super().encode(weight.index_fill(1, index, 0))
        return {**stored, "outlier_index": index.int(), "outlier_weight": weight[:, index].half()}

    def decode(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight, with the features that were split off in their places."""
        weight = super().decode(dtype)
        if self.features:
            weight[:, self.outlier_index.long()] = self.outlier_weight.to(dtype)
        return weight

    def matmul(self, states: torch.Tensor) -> torch.Tensor:
        """The product of torch's, and that of the features that were split off."""
        if not self.features:
            return super().matmul(states)
        index = self.outlier_index.long()
        output = super().matmul(states.index_fill(1, index, 0))
        return output.addmm_(states[:, index], self.outlier_weight.to(states.dtype).T)

    def path(self) -> str:
        """Which product computes few rows, and what is beside it."""
        return f"{super().path()}; {self.features} features in 16 bits" if self.features else super().path()
