"""What conversions take and make: a decoder, as its config and its weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PretrainedConfig, PreTrainedModel

from ..latent import NAME, LatentProjection

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
Weights = dict[str, torch.Tensor]


def layers_of(model: PreTrainedModel, *, latents: bool = False) -> nn.ModuleList:
    """The decoder's layers, of a model that conversions know: one with the projections `ATTENTION`.

    Parameters
    ----------
    latents
        Whether keys and values may pass through latents.

    Raises
    ------
    NotImplementedError
        A model of another make: with an encoder, of several parts, with fused projections, with shared layers.
    ValueError
        A model whose keys and values were converted to latents or to be shared, or whose weights are quantized.
    """
    name, config = type(model).__name__, model.config
    if config.is_encoder_decoder:
        raise NotImplementedError(f"{name} has an encoder; conversions take decoders alone")
    if config.get_text_config(decoder=True) is not config:
        raise NotImplementedError(f"{name} has further parts beside its text model; conversions take text models alone")
    if getattr(config, "quantization_config", None):
        raise ValueError(
            f"the weights of this {name} are quantized. Fix: convert the original, and quantize the result"
        )
    if set(getattr(config, "hfkv", None) or {}) - ({NAME} if latents else set()):
        raise ValueError(
            f"keys and values of this {name} pass through latents or are shared already (config.hfkv={config.hfkv!r}), "
            "and other conversions come before latents, and latents before sharing. Fix: convert the original again, "
            "with all options in one command"
        )
    if getattr(config, "num_kv_shared_layers", 0) or "reuse" in (getattr(config, "kv_sharing_modes", None) or ()):
        raise NotImplementedError(f"{name} shares keys and values natively, and conversions would break that")
    layers = getattr(model.base_model, "layers", None)
    attentions = [getattr(layer, "self_attn", None) for layer in layers] if isinstance(layers, nn.ModuleList) else []
    if not attentions or not all(
        isinstance(getattr(attention, part, None), nn.Linear | LatentProjection)
        for attention in attentions
        for part in ATTENTION
    ):
        raise NotImplementedError(
            f"{name} is not built like Llama: conversions need layers with self_attn.{', self_attn.'.join(ATTENTION)}"
        )
    return layers  # type: ignore[return-value]


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Without dropout and gradients; the model's mode is put back."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def run_watched(model: PreTrainedModel, input_ids: torch.Tensor, handles: Sequence[RemovableHandle]) -> None:
    """One forward of the decoder over ``[rows, tokens]`` with hooks that are there for it alone."""
    try:
        with evaluating(model):
            model.base_model(input_ids.to(model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()


def layer_prefix(model: PreTrainedModel) -> str:
    """What the names of the layers' weights begin with, e.g. ``model.layers.``."""
    return f"{model.base_model_prefix}.layers."


def layer_and_name(prefix: str, name: str) -> tuple[int | None, str]:
    """The layer that a weight belongs to, None for none, and its name in it."""
    if not name.startswith(prefix):
        return None, name
    index, _, rest = name.removeprefix(prefix).partition(".")
    return int(index), rest


def rebuild(model: PreTrainedModel, weights: Weights, changes: Mapping[str, Any], twin: str | None = None) -> Any:
    """A model of a changed config with the given weights, built as `from_pretrained` builds it.

    Parameters
    ----------
    weights
        By their names in the new model; copied.
    changes
        Fields of the config.
    twin
        The ``model_type`` of another architecture that computes the same; None for the model's own.

    Raises
    ------
    NotImplementedError
        The architecture makes other weights of such a config.
    """
    if twin is None:
        fields = {**model.config.to_dict(), **changes}
        config, cls = type(model.config).from_dict(fields), type(model)
    else:
        config, cls = _of_type(model.config, twin, changes)
    # the class and not AutoModel: what was loaded as something else than a causal model stays that
    fresh = cls._from_config(config, dtype=model.dtype, attn_implementation=model.config._attn_implementation)
    expected = {name: tuple(tensor.shape) for name, tensor in fresh.state_dict().items()}
    given = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    for name in expected.keys() | given.keys():
        if expected.get(name) != given.get(name):
            raise NotImplementedError(
                f"{cls.__name__} with {dict(changes)} has {name} of shape {expected.get(name)}, and the converted "
                f"weights {given.get(name)}: this architecture cannot be converted so"
            )
    fresh.load_state_dict(weights)
    fresh.generation_config = copy.deepcopy(model.generation_config)
    return fresh.to(model.device).train(model.training)


def _of_type(config: PretrainedConfig, twin: str, changes: Mapping[str, Any]) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM

    made = AutoConfig.for_model(twin)
    cls = AutoModelForCausalLM._model_mapping[type(made)]
    # what describes the old architecture's classes does not describe the new one
    fields = {key: value for key, value in config.to_dict().items() if key not in ("architectures", "model_type")}
    return type(made).from_dict({key: fields[key] for key in fields if hasattr(made, key)} | dict(changes)), cls
