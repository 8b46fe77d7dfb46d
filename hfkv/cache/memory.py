"""Honest bytes: what a cache holds, counted from the tensors that can be reached from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, EncoderDecoderCache

from .layer import KVLayer


@dataclass(frozen=True)
class LayerMemory:
    """One layer's share.

    Attributes
    ----------
    kind
        The layer's class.
    seen
        Tokens that the layer has seen.
    tokens
        Tokens that it still stands for: fewer where a technique or a sliding layer forgets.
    packed_bytes, full_precision_bytes
        Bytes of packed and of full-precision storage, room to grow included.
    elements
        Numbers that the layer stands for: keys and values of all its tokens.
    """

    kind: str
    seen: int
    tokens: int
    packed_bytes: int
    full_precision_bytes: int
    elements: int

    @property
    def stored_bytes(self) -> int:
        """All bytes of the layer."""
        return self.packed_bytes + self.full_precision_bytes

    @property
    def bits_per_element(self) -> float:
        """Stored bits per number of keys and values."""
        return 8 * self.stored_bytes / self.elements if self.elements else 0.0


@dataclass(frozen=True)
class MemoryReport:
    """What a cache holds, in bytes.

    Attributes
    ----------
    layers
        One `LayerMemory` per layer.
    shared_bytes
        Bookkeeping that belongs to no layer (a padding mask).
    """

    layers: tuple[LayerMemory, ...]
    shared_bytes: int = 0

    @property
    def stored_bytes(self) -> int:
        """Every byte of every tensor that can be reached from the cache."""
        return sum(layer.stored_bytes for layer in self.layers) + self.shared_bytes

    @property
    def packed_bytes(self) -> int:
        """Bytes of packed storage: codes, scales and offsets."""
        return sum(layer.packed_bytes for layer in self.layers)

    @property
    def full_precision_bytes(self) -> int:
        """Bytes of full-precision storage."""
        return sum(layer.full_precision_bytes for layer in self.layers)

    @property
    def elements(self) -> int:
        """Numbers that the cache stands for."""
        return sum(layer.elements for layer in self.layers)

    @property
    def bits_per_element(self) -> float:
        """Stored bits per number of keys and values."""
        return 8 * self.stored_bytes / self.elements if self.elements else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The report as plain numbers, for JSON."""
        names = ("stored_bytes", "packed_bytes", "full_precision_bytes", "shared_bytes", "bits_per_element")
        return {name: getattr(self, name) for name in names} | {
            "layers": [
                asdict(layer) | {"stored_bytes": layer.stored_bytes, "bits_per_element": layer.bits_per_element}
                for layer in self.layers
            ]
        }


def memory(cache_or_output: Any) -> MemoryReport:
    """Count what a cache holds.

    Works for every `transformers.Cache`, so that techniques can be compared, and for what
    ``generate(..., return_dict_in_generate=True)`` returns.

    Raises
    ------
    TypeError
        Neither a cache nor an output that has one.
    """
    cache = cache_or_output
    if not isinstance(cache, Cache):
        cache = getattr(cache, "cache", None) or getattr(cache, "past_key_values", None)
    if not isinstance(cache, Cache):
        raise TypeError(
            f"expected a cache or an output that has one, got {type(cache_or_output).__name__}. "
            "Fix: generate(..., return_dict_in_generate=True)"
        )
    parts = [cache]
    if isinstance(cache, EncoderDecoderCache):
        parts = [cache.self_attention_cache, cache.cross_attention_cache]
    counted: set[int] = set()
    layers = tuple(layer_memory(layer, counted) for part in parts for layer in part.layers)
    everything = sum(tensor_bytes(cache).values())
    return MemoryReport(layers, everything - sum(layer.stored_bytes for layer in layers))


def layer_memory(layer: Any, counted: set[int]) -> LayerMemory:
    """One layer's share, without the storages of ``counted``, which takes up this layer's."""
    # what is known of the padding belongs to all layers, also where a layer holds some of it
    shared = tensor_bytes(getattr(layer, "padding", None))
    # a layer that reads another's keys and values stores nothing
    own = {
        address: size
        for address, size in tensor_bytes(layer).items()
        if address not in shared and address not in counted
    }
    counted.update(own)
    everything = sum(own.values())
    seen = int(layer.get_seq_length()) if hasattr(layer, "get_seq_length") else 0
    tokens = _tokens(layer, seen)
    packed = 0
    if isinstance(layer, KVLayer):
        packed = sum(size for segment, size in layer.segments() if segment != "exact")
    elif getattr(layer, "_quantized_keys", None) is not None:
        packed = sum(tensor_bytes([layer._quantized_keys, layer._quantized_values]).values())
    return LayerMemory(type(layer).__name__, seen, tokens, packed, everything - packed, _elements(layer, tokens))


def _tokens(layer: Any, seen: int) -> int:
    if isinstance(layer, KVLayer):
        return layer.kept_length
    window = getattr(layer, "sliding_window", None)
    return seen if window is None else min(seen, window)


def _elements(layer: Any, tokens: int) -> int:
    if isinstance(layer, KVLayer):
        return layer.elements()
    total = 0
    for name in ("keys", "values"):
        states = getattr(layer, name, None)
        shape = _shape(getattr(layer, f"_quantized_{name}", None)) or getattr(states, "shape", ())
        if len(shape) == 4:
            total += shape[0] * shape[1] * tokens * shape[3]
    return total


def _shape(quantized: Any) -> tuple[int, ...]:
    """The shape that a transformers quantized tensor stands for: a tensor, or (tensor, metadata)."""
    if isinstance(quantized, tuple):
        quantized, metadata = quantized
        if isinstance(metadata, Mapping) and "shape" in metadata:
            return tuple(metadata["shape"])
    return tuple(getattr(quantized, "shape", ()))


def tensor_bytes(root: Any, skip: tuple[str, ...] = ()) -> dict[int, int]:
    """Bytes of every distinct storage that can be reached from an object, by address.

    Parameters
    ----------
    skip
        Attributes not to follow.
    """
    return {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in _tensors(root, skip, set())
        if tensor.device.type != "meta"
    }


def _tensors(root: Any, skip: tuple[str, ...], seen: set[int]) -> Iterator[torch.Tensor]:
    if id(root) in seen or isinstance(root, str | bytes | int | float | type | torch.dtype | torch.device):
        return
    seen.add(id(root))
    if isinstance(root, torch.Tensor):
        if hasattr(root, "__tensor_flatten__"):
            # a quantized tensor of another library: count what it is made of
            names, _ = root.__tensor_flatten__()
            for name in names:
                yield from _tensors(getattr(root, name), skip, seen)
        else:
            yield root
        return
    children: Any = ()
    if isinstance(root, Mapping):
        children = root.values()
    elif isinstance(root, list | tuple | set | frozenset):
        children = root
    elif hasattr(root, "__dict__"):
        children = [value for name, value in vars(root).items() if name not in skip]
    for child in children:
        yield from _tensors(child, skip, seen)
