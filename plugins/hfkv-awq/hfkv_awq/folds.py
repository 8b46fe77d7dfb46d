"""Where the inputs of linear layers are made, so that they can be divided there at no cost while decoding.

A norm's output is divided through its weight. The output of ``v_proj`` reaches ``o_proj`` through a weighted mean, and
that of ``up_proj`` reaches ``down_proj`` through a product: both are divided through the rows of the earlier layer.
Where none of that is known, a layer can divide its input itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

# of a scale that a layer keeps
KEPT_DTYPE = torch.bfloat16


class Source(Protocol):
    """What makes an input ``[..., inputs]`` of linear layers, feature by feature."""

    def shared(self, values: torch.Tensor) -> torch.Tensor:
        """``[inputs]``: the mean of the values of features that can only be divided together, at each of them."""
        ...

    def divide(self, scale: torch.Tensor) -> torch.Tensor:
        """Divide the input by ``[inputs]``; returns by how much it is divided, after rounding."""
        ...


@dataclass(frozen=True)
class NormSource:
    """A norm that multiplies by ``weight + offset``."""

    norm: nn.Module
    offset: float

    def shared(self, values: torch.Tensor) -> torch.Tensor:
        """Each feature has a weight of its own."""
        return values

    @torch.no_grad()
    def divide(self, scale: torch.Tensor) -> torch.Tensor:
        """Rounding the norm's weight is made up for in the layers after it, so nothing is lost in 16 bits."""
        weight: Any = self.norm.weight
        factor = weight.float() + self.offset
        divided = (factor / scale - self.offset).to(weight.dtype)
        reached = divided.float() + self.offset
        # a feature that the norm switches off stays as it is
        usable = (factor != 0) & (reached != 0)
        weight.copy_(torch.where(usable, divided, weight))
        return torch.where(usable, factor / torch.where(usable, reached, 1), 1)


@dataclass(frozen=True)
class RowSource:
    """A linear layer whose outputs become the input: each head's for ``repeats`` query heads."""

    linear: nn.Linear
    head_dim: int
    repeats: int

    def shared(self, values: torch.Tensor) -> torch.Tensor:
        """A value head is read by several query heads."""
        heads = values.view(-1, self.repeats, self.head_dim)
        return heads.mean(1, keepdim=True).expand_as(heads).flatten()

    @torch.no_grad()
    def divide(self, scale: torch.Tensor) -> torch.Tensor:
        """Through the rows of the weight, and the bias."""
        rows = scale.view(-1, self.repeats, self.head_dim)[:, 0].flatten()
        self.linear.weight.copy_(self.linear.weight.float() / rows[:, None])
        if self.linear.bias is not None:
            self.linear.bias.copy_(self.linear.bias.float() / rows)
        return scale


@dataclass(frozen=True)
class LayerSource:
    """The layer itself, which divides its input in every forward."""

    def shared(self, values: torch.Tensor) -> torch.Tensor:
        """Each feature has a scale of its own."""
        return values

    def divide(self, scale: torch.Tensor) -> torch.Tensor:
        """Rounded as it is stored, so that the weight is multiplied by what the input is divided by."""
        return scale.to(KEPT_DTYPE).float()


@dataclass(frozen=True)
class Shared:
    """Linear layers that read the same input.

    Attributes
    ----------
    linears
        Their names.
    source
        Where the input can be divided.
    writer
        The name of the linear layer whose rows ``source`` divides, or None.
    kept
        Whether the layer divides its input itself: nothing of the model is changed.
    """

    linears: tuple[str, ...]
    source: Source
    writer: str | None = None
    kept: bool = False


@dataclass(frozen=True)
class Family:
    """How a kind of decoder layer is built.

    Attributes
    ----------
    mlp_norm
        The norm whose output the MLP reads.
    offset
        What is added to a norm's weight.
    """

    mlp_norm: str
    offset: float


_LLAMA = Family("post_attention_layernorm", 0.0)
_GEMMA = Family("pre_feedforward_layernorm", 1.0)
FAMILIES = {
    **dict.fromkeys(("granite", "llama", "ministral", "mistral", "qwen2", "qwen3", "smollm3"), _LLAMA),
    "gemma": Family("post_attention_layernorm", 1.0),
    **dict.fromkeys(("gemma2", "gemma3_text"), _GEMMA),
}
_PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_PARTS += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm")


def shared_inputs(model: Any) -> list[Shared]:
    """The layers of a model that share an input, in the order in which they compute.

    Raises
    ------
    NotImplementedError
        It is not known where this kind of model makes its inputs.
    """
    kind = model.config.get_text_config(decoder=True).model_type
    family = FAMILIES.get(kind)
    if family is None:
        raise NotImplementedError(
            f"'awq' folds scales into the layers before, and does not know those of {type(model).__name__} ({kind!r}). "
            f"It knows: {', '.join(sorted(FAMILIES))}. Fix: fold=False, which keeps the scales in each layer"
        )
    found: list[Shared] = []
    for name, module in model.named_modules():
        children = dict(module.named_modules()) if hasattr(module, "self_attn") else {}
        if all(part in children for part in (*_PARTS, family.mlp_norm)):
            found.extend(_of_layer(name, children, family))
    return found


def own_inputs(model: Any, names: Iterable[str]) -> list[Shared]:
    """Each of the layers by itself, the output head aside: it divides its input."""
    head = model.get_output_embeddings()
    inner = [name for name in names if head is None or model.get_submodule(name) is not head]
    return [Shared((name,), LayerSource(), kept=True) for name in inner]


def _of_layer(name: str, children: dict[str, Any], family: Family) -> Iterator[Shared]:
    def full(*parts: str) -> tuple[str, ...]:
        return tuple(f"{name}.{part}" for part in parts)

    query, key, value, output = _PARTS[:4]
    gate, up, down = _PARTS[4:7]
    yield Shared(full(query, key, value), NormSource(children["input_layernorm"], family.offset))
    head_dim = children["self_attn"].head_dim
    repeats = children[output].in_features // children[value].out_features
    yield Shared(full(output), RowSource(children[value], head_dim, repeats), *full(value))
    yield Shared(full(gate, up), NormSource(children[family.mlp_norm], family.offset))
    yield Shared(full(down), RowSource(children[up], 1, 1), *full(up))
