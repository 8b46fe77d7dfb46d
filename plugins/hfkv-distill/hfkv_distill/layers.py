"""Where states of a layer can be read: its output, its attention's output, its keys and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

KINDS = ("hidden", "attention", "kv")

States = dict[tuple[str, int], torch.Tensor]


def decoder_layers(model: Any) -> Sequence[Any]:
    """The layers of a decoder, in order.

    Raises
    ------
    NotImplementedError
        No list of layers with attention is found.
    """
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.modules():
        layers = getattr(module, "layers", None)
        if isinstance(layers, nn.ModuleList) and len(layers) == count and hasattr(layers[0], "self_attn"):
            return layers
    raise NotImplementedError(
        f"{type(model).__name__} has no list of {count} layers with self_attn, whose states could be matched"
    )


@contextmanager
def recorded(model: Any, wanted: Mapping[str, Sequence[int]]) -> Iterator[States]:
    """Keep states of some layers while a forward runs, gradients included.

    Parameters
    ----------
    wanted
        The layers of each kind; ``"kv"`` is recorded as ``"key"`` and ``"value"``, before any rotation.

    Returns
    -------
    dict
        ``[batch, tokens, width]`` by (name, layer).

    Raises
    ------
    ValueError
        A layer that is not there, or that has no keys and values of its own.
    """
    states: States = {}
    handles = [
        module.register_forward_hook(_keep(states, name, index)) for name, index, module in _modules(model, wanted)
    ]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


def _modules(model: Any, wanted: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, int, Any]]:
    if not any(wanted.values()):
        return
    layers = decoder_layers(model)
    for kind, indices in wanted.items():
        for index in indices:
            if not 0 <= index < len(layers):
                raise ValueError(f"layer {index} is not there: {type(model).__name__} has 0 to {len(layers) - 1}")
            if kind == "hidden":
                yield "hidden", index, layers[index]
            elif kind == "attention":
                yield "attention", index, layers[index].self_attn
            else:
                for name in ("key", "value"):
                    yield name, index, _projection(layers[index].self_attn, name, index)


def _projection(attention: Any, name: str, index: int) -> Any:
    projection = getattr(attention, f"{name[0]}_proj", None)
    weight = getattr(projection, "weight", None)
    # a layer that reads another's keys and values has an empty projection, or none
    if projection is None or (weight is not None and weight.numel() == 0):
        raise ValueError(f"layer {index} has no keys and values of its own: leave it out of layer_map")
    return projection


def _keep(states: States, name: str, index: int) -> Callable[..., None]:
    def keep(module: Any, args: Any, output: Any) -> None:
        states[name, index] = output[0] if isinstance(output, tuple) else output

    return keep
