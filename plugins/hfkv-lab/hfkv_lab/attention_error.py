"""What a cache does to each layer: the error of keys and values, and of the attention output that is made of them.

The two disagree. A key is multiplied by every query and a value is weighted by attention, so the same error weighs
more or less depending on where it lies; Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache",
2024, choose the grouping of values by the output for that reason.

Each layer is measured alone: it is given the exact queries, keys and values of the full-precision model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import Cache

from hfkv.cache.view import KVHandle
from hfkv.defaults import KEY

from .plan_model import LayerShape, layer_shapes
from .recording import Call

QUERIES = 16


@dataclass(frozen=True)
class LayerError:
    """Relative errors of one layer: the norm of the difference over the norm of what is exact.

    Attributes
    ----------
    layer
        The layer's index.
    keys, values
        Of the keys and values that attention is handed.
    from_keys, from_values
        Of the attention output when only the keys, or only the values, come from the cache.
    output
        Of the attention output.
    """

    layer: int
    keys: float
    values: float
    from_keys: float
    from_values: float
    output: float


def attention_errors(calls: Sequence[Call], cache: Cache) -> list[LayerError]:
    """The errors of each layer that attends to all tokens and whose cache keeps all of them.

    A layer whose cache holds something else than what attends sees (latents, or nothing) is left out.

    Parameters
    ----------
    calls
        As `recording.record` returns them: the last tokens' queries, with the keys and values of all tokens.
    cache
        Empty; it is given each layer's exact keys and values, all but the last tokens first.
    """
    if calls and getattr(calls[0].module.config, KEY, None):
        shapes = layer_shapes(calls[0].module.config)
        calls = [call for call in calls if _shape(call) == shapes[call.layer]]
    return [error for call in calls if (error := _error(call, cache)) is not None]


def _shape(call: Call) -> LayerShape:
    return LayerShape(call.key.shape[1], call.key.shape[3], call.value.shape[3])


@torch.no_grad()
def _error(call: Call, cache: Cache) -> LayerError | None:
    if call.is_sliding:
        return None
    past = call.key.shape[2] - call.query.shape[2]
    handed: Sequence[torch.Tensor] = ()
    for begin, end in ((0, past), (past, call.key.shape[2])):
        # a copy: a cache may keep what it is given, and write to it
        states = (call.key[:, :, begin:end].clone(), call.value[:, :, begin:end].clone())
        handed = cache.update(*states, call.layer)
    key, value = (state.dense() if isinstance(state, KVHandle) else state for state in handed)
    if key.shape != call.key.shape:
        # tokens were left out: nothing to compare one by one
        return None
    exact = call.output(call.key, call.value)
    return LayerError(
        call.layer,
        relative(key, call.key),
        relative(value, call.value),
        relative(call.output(key, call.value), exact),
        relative(call.output(call.key, value), exact),
        relative(call.output(key, value), exact),
    )


def relative(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """The norm of the difference over the norm of the exact tensor."""
    return float((actual.float() - exact.float()).norm() / exact.float().norm())
