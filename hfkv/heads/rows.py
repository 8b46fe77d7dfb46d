"""Rows of a model's output embedding, copied once for the heads that draft with them."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

# the weight [draft_vocab_size, hidden_size], and the bias where there is one
Rows = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True)
class _Copy:
    """A copy, and what it was made of; the model is not kept alive by it."""

    rows: Rows
    sources: list[weakref.ref[torch.Tensor]]
    states: list[tuple[int, int]]

    def is_of(self, tensors: list[torch.Tensor]) -> bool:
        """Whether these are the tensors, with the values that they had."""
        return len(tensors) == len(self.sources) and all(
            source() is tensor and state == _state(tensor)
            for source, tensor, state in zip(self.sources, tensors, self.states, strict=True)
        )


# outside of the heads, whose copies and files have no use for it; freed with them
_COPIES: weakref.WeakKeyDictionary[nn.Module, _Copy] = weakref.WeakKeyDictionary()


def kept_rows(heads: Any, model: Any) -> Rows | None:
    """The copy of the rows that the heads' draft vocabulary picks; None where they cannot be read row by row.

    That is so for no draft vocabulary, for packed weights and other kinds of layers, and for weights that accelerate
    fetches for each forward.
    """
    lm_head, picked = model.get_output_embeddings(), heads.draft_vocabulary
    if picked is None or type(lm_head) is not nn.Linear or lm_head.weight.is_meta:
        return None
    sources = [picked, lm_head.weight, *([] if lm_head.bias is None else [lm_head.bias])]
    found = _COPIES.get(heads)
    if found is None or not found.is_of(sources):
        bias = None if lm_head.bias is None else lm_head.bias.detach()[picked]
        rows = lm_head.weight.detach()[picked], bias
        found = _Copy(rows, [weakref.ref(source) for source in sources], [_state(source) for source in sources])
        # changes of an inference tensor do not show
        if not any(source.is_inference() for source in sources):
            _COPIES[heads] = found
    return found.rows


def _state(tensor: torch.Tensor) -> tuple[int, int]:
    """Where the values are and how often they were changed in place."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version
