"""The oracle for techniques that forget: attention without a cache over exactly the tokens that a query sees.

Each layer's attention runs for each query on the states of those tokens alone, by the model's own code, at the
positions that they have for this query. What is compared with it shares no code with it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

# for each query of a sequence, the tokens that it sees and how much nearer they stand (`KVLayer.attended`)
Pattern = tuple[torch.Tensor, torch.Tensor]


@contextmanager
def forgetting(model: Any, patterns: Mapping[int, Pattern]) -> Iterator[None]:
    """Let each of these layers attend as its pattern says, in forwards of whole sequences, no padding, no cache."""
    decoder = model.get_decoder()
    shared: dict[int, Any] = {}
    found = {}
    for module in decoder.modules():
        index = _layer_of(module, decoder.config)
        if index is not None and index in patterns and "Attention" in type(module).__name__:
            found[module] = _attention(module, patterns[index], shared)
    if not found:
        raise ValueError(f"{type(model).__name__} has no attention modules that say which layer they are")
    for module, forward in found.items():
        module.forward = forward
    try:
        yield
    finally:
        for module in found:
            del module.forward


def _layer_of(module: Any, config: Any) -> int | None:
    """The layer whose keys and values an attention module reads."""
    index: int | None = getattr(module, "layer_idx", None)
    if getattr(module, "is_kv_shared_layer", False) and index is not None:
        owners = config.layer_types[: config.num_hidden_layers - config.num_kv_shared_layers]
        index = max(owner for owner, kind in enumerate(owners) if kind == config.layer_types[index])
    return index


def _attention(module: Any, pattern: Pattern, shared: dict[int, Any]) -> Any:
    forward, signature = module.forward, inspect.signature(module.forward)

    def attention(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        given.update(given.pop("kwargs", {}))
        if given.get("key_value_states") is not None:
            # cross-attention
            return forward(*args, **kwargs)
        if given.get("position_embeddings") is None:
            given["mask"] = _narrowed(given["mask"], pattern[0], module.config._attn_implementation)
            return forward(**given)
        return _query_by_query(forward, given, pattern, shared), None

    return attention


def _narrowed(mask: torch.Tensor | None, visible: torch.Tensor, attention: str) -> torch.Tensor:
    """The mask of a model without positions in its attention: what is not seen is left out."""
    if attention == "eager":
        hidden = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
        return hidden[None, None] if mask is None else mask.minimum(hidden)
    return visible[None, None] if mask is None else mask & visible


def _query_by_query(forward: Any, given: dict[str, Any], pattern: Pattern, shared: dict[int, Any]) -> torch.Tensor:
    """One row per query; those that see the same number of tokens are run together."""
    states, tables = given.pop("hidden_states"), given.pop("position_embeddings")
    own = {key: given.pop(key) for key in ("attention_mask", "shared_kv_states") if key in given}
    visible, nearer = pattern
    counts = visible.sum(dim=1)
    output = states.new_empty(states.shape)
    for count in counts.unique().tolist():
        queries = (counts == count).nonzero().squeeze(1)
        tokens = visible[queries].nonzero()[:, 1].unflatten(0, (len(queries), count))
        positions = tokens + nearer[queries].gather(1, tokens)
        if "shared_kv_states" in own:
            # layers that read another one's keys and values read those of the same queries
            given["shared_kv_states"] = shared.setdefault(count, copy.copy(own["shared_kv_states"]))
        # only the newest token's row is taken, and it sees all: no mask
        rows, _ = forward(
            hidden_states=states[:, tokens].flatten(0, 1),
            position_embeddings=_rows_of(tables, len(states), positions),
            attention_mask=None,
            **given,
        )
        output[:, queries] = rows[:, -1].unflatten(0, (len(states), len(queries)))
    return output


def _rows_of(tables: Any, batch: int, positions: torch.Tensor) -> Any:
    """Position embeddings (one tensor, or a tuple of them) of each query's tokens, a row per query."""
    if isinstance(tables, torch.Tensor):
        return tables.expand(batch, -1, -1)[:, positions].flatten(0, 1)
    return tuple(_rows_of(table, batch, positions) for table in tables)
