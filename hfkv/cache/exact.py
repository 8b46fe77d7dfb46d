"""The full-precision storage: keys and values, token after token."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .view import ExactBuffers, in_stored_order


class ExactStore:
    """A run of tokens with room to grow: appended at its end, cut anywhere.

    It starts as the tensors that it is given, views of larger activations as a rule, until `cut` makes it hold its
    own. A cut makes new tensors and moves nothing in place, so views taken before stay valid.

    Attributes
    ----------
    buffers
        The tensors; the first ``length`` tokens of them are in use.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._hold(keys, values)
        self.length = keys.shape[2]

    def _hold(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.buffers = ExactBuffers(keys, values)
        # tokens that there is room for; every step asks
        self.room = keys.shape[2]

    @property
    def keys(self) -> torch.Tensor:
        """``[batch, kv_heads, room, head_dim]``."""
        return self.buffers.keys

    @property
    def values(self) -> torch.Tensor:
        """``[batch, kv_heads, room, head_dim]``."""
        return self.buffers.values

    @property
    def nbytes(self) -> int:
        """Bytes of storage, room to grow included."""
        return self.keys.untyped_storage().nbytes() + self.values.untyped_storage().nbytes()

    @property
    def token_elements(self) -> int:
        """Numbers of one token: keys and values, of all rows and heads."""
        return sum(buffer.shape[0] * buffer.shape[1] * buffer.shape[3] for buffer in (self.keys, self.values))

    def view(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens in use, without a copy."""
        return self.keys.narrow(2, 0, self.length), self.values.narrow(2, 0, self.length)

    def append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Write tokens in place where there is room, else join them to a run that is exactly sized."""
        count = key_states.shape[2]
        if self.length + count <= self.room:
            # every step comes by: `narrow` takes a third of the time of an index expression
            self.keys.narrow(2, self.length, count).copy_(key_states)
            self.values.narrow(2, self.length, count).copy_(value_states)
        else:
            keys, values = self.view()
            self._hold(torch.cat([keys, key_states], dim=2), torch.cat([values, value_states], dim=2))
        self.length += count

    def cut(self, begin: int, end: int, room: int) -> None:
        """Hold the tokens in new buffers, for ``room`` tokens at least, those from ``begin`` to ``end`` left out."""
        kept = self.length - (end - begin)

        def copied(states: torch.Tensor) -> torch.Tensor:
            buffer = states.new_empty(*states.shape[:2], max(kept, room), states.shape[3])
            buffer[:, :, :begin] = states[:, :, :begin]
            buffer[:, :, begin:kept] = states[:, :, end : self.length]
            return buffer

        self._hold(copied(self.keys), copied(self.values))
        self.length = kept

    def reorder(self, order: torch.Tensor | None) -> None:
        """Bring the tokens from token order to stored order (`Padding.order`)."""
        if order is not None:
            self._hold(*(in_stored_order(states, order) for states in self.view()))

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Pass the buffers through a function that keeps the tokens."""
        self._hold(function(self.keys), function(self.values))
