"""What the weights of a model are, counted from the tensors."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from .linear import QuantizedLinear


@dataclass(frozen=True)
class LayerWeights:
    """One quantized layer.

    Attributes
    ----------
    name, backend
        The module, and the weight quantizer that it is of.
    options
        The options that it was quantized with.
    path
        How a token is computed.
    stored_bytes
        Bytes of everything that stands for the weight.
    weights
        Numbers of the weight.
    """

    name: str
    backend: str
    options: dict[str, Any]
    path: str
    stored_bytes: int
    weights: int

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per number of the weight."""
        return 8 * self.stored_bytes / self.weights


@dataclass(frozen=True)
class WeightReport:
    """What `hfkv.describe` finds; printing it shows a table.

    Attributes
    ----------
    layers
        One `LayerWeights` per quantized layer.
    plain_bytes
        Bytes of all else: embeddings, norms, the layers that were left out.
    """

    layers: tuple[LayerWeights, ...]
    plain_bytes: int

    @property
    def packed_bytes(self) -> int:
        """Bytes of the quantized layers' weights."""
        return sum(layer.stored_bytes for layer in self.layers)

    @property
    def stored_bytes(self) -> int:
        """Bytes of every parameter and buffer."""
        return self.packed_bytes + self.plain_bytes

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per number of the quantized layers' weights."""
        weights = sum(layer.weights for layer in self.layers)
        return 8 * self.packed_bytes / weights if weights else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data, for JSON."""
        names = ("stored_bytes", "packed_bytes", "plain_bytes", "bits_per_weight")
        return {name: getattr(self, name) for name in names} | {
            "layers": [asdict(layer) | {"bits_per_weight": layer.bits_per_weight} for layer in self.layers]
        }

    def __str__(self) -> str:
        kinds: dict[tuple[str, str, str], list[LayerWeights]] = {}
        for layer in self.layers:
            options = ", ".join(f"{name}={value}" for name, value in layer.options.items())
            kinds.setdefault((layer.backend, options, layer.path), []).append(layer)
        lines = []
        for (backend, options, path), layers in kinds.items():
            size = sum(layer.stored_bytes for layer in layers)
            bits = 8 * size / sum(layer.weights for layer in layers)
            lines += [f"{len(layers)} layers: {backend} ({options})", f"    {bits:.3f} bits per weight, {size:,} bytes"]
            lines.append(f"    {path}")
        lines.append(f"all else: {self.plain_bytes:,} bytes")
        return "\n".join(lines)


def describe(model: nn.Module) -> WeightReport:
    """Say what is quantized, how, in how many bits, and which way each layer computes."""
    layers: list[LayerWeights] = []
    counted: set[int] = set()
    for name, module in model.named_modules():
        if not isinstance(module, QuantizedLinear):
            continue
        stored = module.stored_bytes
        counted.update(id(buffer) for buffer in module.buffers(recurse=False))
        weights = module.in_features * module.out_features
        layers.append(LayerWeights(name, module.backend, module.options.as_dict(), module.path(), stored, weights))
    plain = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (*model.parameters(), *model.buffers())
        if id(tensor) not in counted
    }
    return WeightReport(tuple(layers), sum(plain.values()))
