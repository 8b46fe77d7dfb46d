"""Quantize the weights of a loaded model, and turn them back."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.logging import tqdm

from .config import WeightConfig
from .linear import QuantizedLinear
from .plan import Plan, plan


def quantize_weights(model: PreTrainedModel, config: WeightConfig) -> PreTrainedModel:
    """Quantize a model's linear layers in place; a bar shows how far it is.

    What `from_pretrained` does with ``quantization_config=config``, for a model that is loaded already. The model can
    be saved with `save_pretrained` afterwards.

    Returns
    -------
    PreTrainedModel
        The same model.

    Raises
    ------
    ValueError
        The model is quantized already, or the config names what the model has not.
    NotImplementedError
        The model has no linear layer.
    """
    from .hf_quantizer import HFKVWeightQuantizer

    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"expected a transformers model, got {type(model).__name__}")
    if not isinstance(config, WeightConfig):
        raise TypeError(f"expected a hfkv.WeightConfig, got {type(config).__name__}")
    earlier: Any = getattr(model, "hf_quantizer", None)
    if earlier is not None:
        method = getattr(earlier.quantization_config, "quant_method", "another method")
        raise ValueError(f"the model is quantized already, by {method!r}. Fix: model.dequantize() first")
    found = plan(model, config)
    replace_all(model, found)
    quantizer = HFKVWeightQuantizer(resolved(config, found), pre_quantized=False)
    # what from_pretrained leaves on a quantized model: save_pretrained and the Trainer read it
    method = quantizer.quantization_config.quant_method
    for name, value in {"hf_quantizer": quantizer, "is_quantized": True, "quantization_method": method}.items():
        setattr(model, name, value)
    quantizer.postprocess_model(model)
    return model


def resolved(config: WeightConfig, found: Plan) -> WeightConfig:
    """The config as it is saved: with the modules that were left out by name, so that no later rule chooses others."""
    saved = config.to_dict()
    return WeightConfig(**(saved if config.skip is not None else {**saved, "skip": list(found.skip)}))


def replace_all(model: PreTrainedModel, found: Plan) -> None:
    """Put quantized layers in the place of those of a plan that are still plain."""
    waiting = {name: target for name, target in found.targets.items() if type(_loaded(model, name)) is nn.Linear}
    by_class: dict[type[QuantizedLinear], dict[str, Any]] = {}
    for name, (layer_class, options) in waiting.items():
        by_class.setdefault(layer_class, {})[name] = options
    # those that look at the whole model come first: it is still plain then
    ordered = sorted(by_class.items(), key=lambda item: not item[0].whole_model)
    for layer_class, targets in ordered:
        layers = layer_class.convert(model, targets)
        for name, layer in tqdm(layers, total=len(targets), desc="Quantizing weights"):
            replace(model, name, layer)
    split(model, found.tied)


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module in the place of the one that has that name."""
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


def _loaded(model: nn.Module, name: str) -> nn.Module:
    module: Any = model.get_submodule(name)
    if type(module) is nn.Linear and module.weight.device.type == "meta":
        raise RuntimeError(f"{name} has no weight to quantize: it was not in the checkpoint, or is offloaded")
    return module


def split(model: PreTrainedModel, tied: frozenset[str]) -> None:
    """Untie the heads that have a quantized weight of their own; the config says so, and so does what is saved."""
    if not tied:
        return
    for config in (model.config, model.config.get_text_config(decoder=True)):
        config.tie_word_embeddings = False
    keys = {key: value for key, value in model.all_tied_weights_keys.items() if key.removesuffix(".weight") not in tied}
    model.all_tied_weights_keys = keys


@torch.no_grad()
def restore_all(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Put plain layers with the decoded weights in the place of the quantized ones."""
    for name, module in list(model.named_modules()):
        if isinstance(module, QuantizedLinear):
            replace(model, name, module.restored(dtype))
