"""The last hidden states that the target computes anyway, kept for heads that read them."""

from __future__ import annotations

from typing import Any

import torch

from hfkv import decoding
from hfkv.speculation import Block, Call


class HiddenStates:
    """Watches the target's forwards of one call: what its output embedding reads, of every token.

    States are asked for by column of `Block.ids`. Those of the prompt are there once it was given, those of later
    columns with each verification; a column that is given again replaces what was held from there on.
    """

    def __init__(self, call: Call) -> None:
        self._cache = call.cache
        self._parts: list[torch.Tensor] = []
        # places in the target's cache: of the first state that is held, and behind the last
        self._first, self._end = 0, 0
        # tokens in the target's cache from before this call, of which no ids were given
        self._offset = 0
        self._handle = call.model.base_model.register_forward_hook(self._keep, with_kwargs=True)

    def close(self) -> None:
        """Stop watching."""
        self._handle.remove()

    def _keep(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        # the same model may decode another text in another thread
        if not any(value is self._cache for value in kwargs.values()):
            return
        states = output[0]
        end = decoding.decoder_layers(self._cache)[0].get_seq_length()
        start = end - states.shape[1]
        if self._parts and start < self._end:
            held = torch.cat(self._parts, dim=1)[:, : start - self._first]
            # a slice would keep the whole alive
            self._parts = [held.clone()] if start > self._first else []
        if not self._parts:
            self._first = start
        self._parts.append(states)
        self._end = end

    def keep(self, places: list[int]) -> None:
        """Of the states of the newest forward, keep those at these places, in this order."""
        states = self._parts[-1]
        self._parts[-1] = states[:, places]
        self._end -= states.shape[1] - len(places)

    def align(self, block: Block) -> None:
        """Learn which column is which: called before the states of a round are asked for."""
        self._offset = decoding.decoder_layers(self._cache)[0].get_seq_length() - block.cached

    @property
    def first(self) -> int:
        """The first column whose state is held."""
        return self._first - self._offset

    @property
    def end(self) -> int:
        """Behind the last column whose state is held."""
        return self._end - self._offset

    def columns(self, start: int, stop: int) -> torch.Tensor:
        """States of columns, ``[rows, stop - start, hidden_size]``."""
        self._parts = [torch.cat(self._parts, dim=1)] if len(self._parts) > 1 else self._parts
        return self._parts[0][:, start - self.first : stop - self.first]

    def forget(self, column: int) -> None:
        """Drop the states of all columns before one."""
        drop = column - self.first
        if drop > 0:
            kept = self.columns(column, self.end).clone()
            self._parts, self._first = [kept], self._first + drop
