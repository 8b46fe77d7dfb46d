"""What a text shows of each hidden channel, neuron and head: how much passes through it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from .decoder import layers_of, run_watched


@dataclass
class Importance:
    """Sums over the tokens of a text.

    Attributes
    ----------
    hidden
        ``[hidden_size]``: what the norms hand on, without sign, of all norms.
    neurons
        For each layer ``[intermediate_size]``: a neuron's activation, times the norm of the weights that read it.
    groups
        For each layer ``[kv_heads]``: the norm of what the query heads of a KV head add to the residual stream.
    energy
        For each norm, by name, ``[hidden_size]``: the squares of what goes into it.
    """

    hidden: torch.Tensor
    neurons: list[torch.Tensor] = field(default_factory=list)
    groups: list[torch.Tensor] = field(default_factory=list)
    energy: dict[str, torch.Tensor] = field(default_factory=dict)


def importance(model: PreTrainedModel, input_ids: torch.Tensor, kv_heads: int) -> Importance:
    """Measure a model in one forward of ``[rows, tokens]``.

    After Muralidharan et al., "Compact Language Models via Pruning and Knowledge Distillation", 2024 (Minitron):
    activations decide. Those of neurons and heads are weighted by what reads them.
    """
    hidden = model.config.hidden_size
    found = Importance(torch.zeros(hidden))
    handles = []
    layer: Any
    for layer in layers_of(model):
        handles.append(layer.mlp.down_proj.register_forward_pre_hook(_neurons(found.neurons)))
        handles.append(layer.self_attn.o_proj.register_forward_pre_hook(_groups(found.groups, kv_heads)))
    for name, module in hidden_norms(model):
        handles.append(module.register_forward_hook(_norm(found, name)))
    run_watched(model, input_ids, handles)
    return found


def hidden_norms(model: PreTrainedModel) -> list[tuple[str, Any]]:
    """The norms over hidden channels, by the name of their weight; those of single heads are left out.

    Raises
    ------
    NotImplementedError
        A norm that takes the mean away as well: cutting channels would move it.
    """
    result = []
    for name, module in model.named_modules():
        kind = type(module).__name__
        if not kind.endswith("Norm") or name.endswith(("q_norm", "k_norm")):
            continue
        if not kind.endswith("RMSNorm"):
            raise NotImplementedError(f"{name} is a {kind}; hidden channels can be cut where all norms are RMS norms")
        result.append((f"{name}.weight", module))
    return result


def _norm(found: Importance, name: str) -> Callable[..., None]:
    def note(module: Any, args: Any, output: torch.Tensor) -> None:
        found.hidden += output.float().abs().flatten(0, -2).sum(0).cpu()
        found.energy[name] = args[0].double().square().flatten(0, -2).sum(0).cpu()

    return note


def _neurons(found: list[torch.Tensor]) -> Callable[..., None]:
    def note(projection: Any, args: Any) -> None:
        activity = args[0].float().abs().flatten(0, -2).sum(0)
        found.append((activity * projection.weight.float().norm(dim=0)).cpu())

    return note


def _groups(found: list[torch.Tensor], kv_heads: int) -> Callable[..., None]:
    def note(projection: Any, args: Any) -> None:
        states = args[0].flatten(0, -2).chunk(kv_heads, dim=-1)
        readers = projection.weight.chunk(kv_heads, dim=-1)
        added = [(state @ reader.T).float().norm(dim=-1).sum() for state, reader in zip(states, readers, strict=True)]
        found.append(torch.stack(added).cpu())

    return note
