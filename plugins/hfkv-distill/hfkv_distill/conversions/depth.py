"""Fewer layers: those whose removal a text shows to matter least.

Men et al., "ShortGPT: Layers in Large Language Models are More Redundant Than You Expect", 2024: a layer's influence is
one minus the cosine between what goes in and what comes out. The divergence that its removal causes costs a forward for
each layer and sees what the influence cannot: what the layers after it make of the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from .decoder import layer_and_name, layer_prefix, layers_of, rebuild, run_watched
from .measure import log_probabilities


def drop_layers(model: PreTrainedModel, layers: Sequence[int]) -> Any:
    """The model without some layers; those that stay are numbered anew.

    Parameters
    ----------
    layers
        Indices of the layers to drop.

    Raises
    ------
    ValueError
        Layers that are not there, or all of them.
    """
    count = len(layers_of(model))
    dropped = set(layers)
    if not dropped or not dropped <= set(range(count)) or len(dropped) == count:
        raise ValueError(f"layers={list(layers)!r} must be some of the layers 0 to {count - 1}, and not all")
    places = {old: new for new, old in enumerate(index for index in range(count) if index not in dropped)}
    prefix, weights = layer_prefix(model), {}
    for name, tensor in model.state_dict().items():
        index, rest = layer_and_name(prefix, name)
        if index is None:
            weights[name] = tensor
        elif index in places:
            weights[f"{prefix}{places[index]}.{rest}"] = tensor
    changes: dict[str, Any] = {"num_hidden_layers": len(places)}
    for name, value in model.config.to_dict().items():
        # one entry for each layer: layer_types, no_rope_layers
        if "layer" in name and isinstance(value, list) and len(value) == count:
            changes[name] = [value[index] for index in places]
    return rebuild(model, weights, changes)


def choose_layers(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    count: int,
    by: str = "influence",
    step: Callable[[], None] = lambda: None,
) -> list[int]:
    """The layers that can be dropped at the least cost.

    Parameters
    ----------
    input_ids
        ``[rows, tokens]`` of text that is like what the model will read.
    by
        ``"influence"``: those that change their input least, one forward. ``"kl"``: those without which the model
        predicts most like before, one after the other, each with those before it gone: a forward for each layer left.
    step
        Called after each forward.

    Raises
    ------
    ValueError
        A number that leaves no layer, or an unknown measure.
    """
    layers = layers_of(model)
    if not 0 < count < len(layers):
        raise ValueError(f"count={count}: of {len(layers)} layers, 1 to {len(layers) - 1} can be dropped")
    if by == "influence":
        influence = block_influence(model, input_ids)
        step()
        return sorted(sorted(range(len(layers)), key=influence.__getitem__)[:count])
    if by != "kl":
        raise ValueError(f"by={by!r} is not known. Choose from: influence, kl")
    expected = log_probabilities(model, input_ids)
    dropped: list[int] = []
    for _ in range(count):
        costs = {}
        for index in set(range(len(layers))) - set(dropped):
            with _without(model, [*dropped, index]):
                actual = log_probabilities(model, input_ids)
            costs[index] = float((expected.exp() * (expected - actual)).sum(-1).mean())
            step()
        dropped.append(min(costs, key=costs.__getitem__))
    return sorted(dropped)


def block_influence(model: PreTrainedModel, input_ids: torch.Tensor) -> list[float]:
    """One minus the mean cosine between each layer's input and output, by layer."""
    found: list[float] = []

    def note(layer: Any, args: Any, output: Any) -> None:
        after = output[0] if isinstance(output, tuple) else output
        cosine = torch.nn.functional.cosine_similarity(args[0].float(), after.float(), dim=-1)
        found.append(1 - float(cosine.mean()))

    handles = [layer.register_forward_hook(note) for layer in layers_of(model)]
    run_watched(model, input_ids, handles)
    return found


@contextmanager
def _without(model: PreTrainedModel, dropped: Sequence[int]) -> Iterator[None]:
    """The model with some layers passing on what they are given."""

    def skip(layer: Any, args: Any, output: Any) -> Any:
        return (args[0], *output[1:]) if isinstance(output, tuple) else args[0]

    layers = layers_of(model)
    handles = [layers[index].register_forward_hook(skip) for index in dropped]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
