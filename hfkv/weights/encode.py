"""The step of transformers' loader that encodes one weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps

from .linear import QuantizedLinear
from .quantize import replace


class Encode(ConversionOps):
    """Swaps a linear layer for its quantized one at the moment when its weight arrives."""

    def __init__(self, targets: Mapping[str, tuple[type[QuantizedLinear], Any]]) -> None:
        self.targets = targets

    def convert(  # type: ignore[override]
        self,
        input_dict: dict[str, Any],
        *args: Any,
        model: Any = None,
        full_layer_name: str | None = None,
        missing_keys: Any = None,
        **kwargs: Any,
    ) -> dict[str, torch.Tensor]:
        """Nothing that the loader would have to set."""
        value = next(iter(input_dict.values()))
        weight = value[0] if isinstance(value, list) else value
        parameter = str(full_layer_name)
        name = parameter.removesuffix(".weight")
        layer_class, options = self.targets[name]
        linear: nn.Linear = model.get_submodule(name)
        replace(model, name, layer_class.quantized(linear, options, weight))
        if missing_keys is not None:
            missing_keys.discard(parameter)
        return {}
