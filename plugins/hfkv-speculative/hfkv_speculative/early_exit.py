"""The first layers of the model draft for all of them.

Elhoushi et al., "LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding", 2024. The draft is the model
without its last layers; it pays for models that were trained to be left early.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from torch import nn

from hfkv.cache import check_length, option
from hfkv.speculation import RolloutOptions

from .shared import SharedCacheDrafter


@dataclass(frozen=True, kw_only=True)
class EarlyExitOptions(RolloutOptions):
    """Options of the assistant "early-exit"."""

    exit_layer: int | None = option(None, "layers that draft; None is half of them")

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        if self.exit_layer is not None:
            check_length("exit_layer", self.exit_layer, minimum=1)


class EarlyExitDrafter(SharedCacheDrafter):
    """The assistant "early-exit"."""

    Options = EarlyExitOptions
    resources: int

    @classmethod
    def prepare(cls, model: Any, options: EarlyExitOptions) -> int:
        """How many layers draft."""
        cls.check_model(model)
        layers = getattr(model.base_model, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise NotImplementedError(f"{type(model).__name__} has no `layers` in a row that could be left early")
        exit_layer = options.exit_layer or len(layers) // 2
        if not 0 < exit_layer < len(layers):
            raise ValueError(f"exit_layer={exit_layer} must be less than the {len(layers)} layers of the model")
        return exit_layer

    def draft_model(self) -> Any:
        """The model with its first layers, every module of it shared."""
        model = _shallow(self.call.model)
        base = _shallow(model.base_model)
        base.layers = nn.ModuleList(base.layers[: self.resources])
        base.config = copy.copy(base.config)
        base.config.num_hidden_layers = self.resources
        setattr(model, model.base_model_prefix, base)
        return model

    @property
    def layers(self) -> list[Any]:
        """Those that draft."""
        return super().layers[: self.resources]


def _shallow(module: Any) -> Any:
    """A module of its own with the same submodules and parameters."""
    copied = copy.copy(module)
    copied._modules = dict(module._modules)
    return copied
