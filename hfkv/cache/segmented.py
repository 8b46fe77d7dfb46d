"""The common layer: tokens are stored in segments, and attention reads them where they are."""

from __future__ import annotations

from typing import Any

import torch

from .segments import Segments
from .view import KVHandle
from .window import WindowHandle, WindowView


class SegmentedLayer(Segments):
    """`Segments`, and what attention is handed of them.

    While past is recorded (assisted decoding), packing waits for the crop that follows each forward, so that drafts
    which are rejected are never packed; and of what a window has left behind since, `hfkv.cache.window.RECORDED` tokens
    stay.
    """

    def attended(self, length: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Which tokens each query sees, and how much nearer than they were."""
        return None if self.window is None else self.window.pattern(length)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that attention will see."""
        seen = self.get_seq_length()
        return (seen + query_length, 0) if self.window is None else self.window.mask_sizes(seen, query_length)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens, then pack every whole block that has left the residual.

        What is returned shows the current tokens in full precision, however many were packed.
        """
        if self._unsettled:
            # no crop came after the last forward: its tokens stay
            self._settle()
        past, count = self.get_seq_length(), key_states.shape[2]
        # a prompt is packed at once: layer by layer, one is alive in full precision
        waits = self.record_past and past > 0
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._uncropped += count
        seen = past + count
        if self.window is not None and self.window.hides(seen):
            result = self._windowed(key_states, value_states, seen)
        elif torch.is_grad_enabled() and key_states.requires_grad:
            result = self._differentiable(key_states, value_states)
            self._append(key_states.detach(), value_states.detach())
        elif past == 0:
            # the prompt: attention sees it as the model made it
            result = key_states, value_states
            self._append(key_states, value_states)
        else:
            self._append(key_states, value_states)
            result = self._attended()
        self._unsettled = waits
        if not waits:
            self._settle()
        return result

    def _differentiable(
        self, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        past = self.dense()
        if past is None:
            return key_states, value_states
        return torch.cat([past[0], key_states], dim=2), torch.cat([past[1], value_states], dim=2)

    def _windowed(
        self, key_states: torch.Tensor, value_states: torch.Tensor, seen: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens; return what these queries see of all."""
        assert self.window is not None
        if torch.is_grad_enabled() and key_states.requires_grad:
            past = self._exact_states()
            keys, values = key_states, value_states
            if past is not None:
                keys, values = torch.cat([past[0], keys], dim=2), torch.cat([past[1], values], dim=2)
            self._append(key_states.detach(), value_states.detach())
        else:
            self._append(key_states, value_states)
            assert self._exact is not None
            keys, values = self._exact.view()
        packed = None
        if self._packed is not None and self._packed_length:
            packed = self._packed[0].view(), self._packed[1].view()
            if self.reads_upper_half:
                packed = packed[0].upper_half, packed[1].upper_half
        order = self._order if self._is_split else self.padding.order(self.sink_length)
        order = None if order is None else order.to(keys.device)
        view = WindowView.of(
            self.window, keys, values, packed, seen, self._dropped, order, self._is_split, self.padding
        )
        return WindowHandle(view, "keys"), WindowHandle(view, "values")

    def steps_ahead(self) -> int | None:
        """Tokens until the next block is packed."""
        return max(1, self._room - self._exact_length)

    def _attended(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._packed is None:
            assert self._exact is not None
            return self._exact.view()
        view = self._view().coarse() if self.reads_upper_half else self._view()
        return KVHandle(view, "keys"), KVHandle(view, "values")
