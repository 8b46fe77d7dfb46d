"""What a cache knows of the padding in its batch."""

from __future__ import annotations

import torch


class Padding:
    """The tokens of a batch that are padding.

    Packed blocks must not be widened by padding, and a row's sinks are its first real tokens, not its padding. The
    attention mask tells which is which where `generate` is given one; without a mask all tokens count as real.

    Attributes
    ----------
    mask
        ``[batch, tokens]`` boolean, True for real tokens; later tokens are real. None: no padding is known.
    """

    def __init__(self) -> None:
        self.mask: torch.Tensor | None = None
        self._orders: dict[int, torch.Tensor | None] = {}

    def note(self, attention_mask: torch.Tensor | None) -> None:
        """Remember a 2D attention mask; one without zeros tells nothing new."""
        if attention_mask is None or attention_mask.ndim != 2 or bool(attention_mask.all()):
            return
        self.mask = attention_mask.bool()

    def clear(self) -> None:
        """Forget everything: the cache is empty."""
        self.mask = None
        self._orders = {}

    def order(self, sink_length: int) -> torch.Tensor | None:
        """Stored order: each row's first real tokens before its padding.

        Returns ``[batch, slots]`` long, the token at each of the first stored slots; None where nothing moves. It is
        decided once: a layer that has packed must find the same order again.
        """
        if sink_length not in self._orders:
            self._orders[sink_length] = self._order(sink_length)
        return self._orders[sink_length]

    def _order(self, sink_length: int) -> torch.Tensor | None:
        if self.mask is None or sink_length == 0:
            return None
        left = (self.mask.cumsum(dim=1) == 0).sum(dim=1)
        longest = int(left.max())
        if longest == 0:
            return None
        slots = torch.arange(longest + sink_length, device=self.mask.device).expand(len(left), -1)
        left = left[:, None]
        moved = torch.where(slots < sink_length, slots + left, slots - sink_length)
        return torch.where(slots < left + sink_length, moved, slots)

    def real(self, start: int, stop: int, order: torch.Tensor | None) -> torch.Tensor | None:
        """``[batch, stop - start]`` True for real tokens, in the stored slots from ``start`` on; None if all are."""
        if self.mask is None or start >= self.mask.shape[1]:
            return None
        known = self.mask
        if order is not None:
            order, slots = order.to(known.device), order.shape[1]
            padded = torch.nn.functional.pad(known, (0, max(0, slots - known.shape[1])), value=True)
            known = torch.cat([padded.gather(1, order), padded[:, slots:]], dim=1)
        part = known[:, start:stop]
        if bool(part.all()):
            return None
        return torch.nn.functional.pad(part, (0, stop - start - part.shape[1]), value=True)

    def count(self, start: torch.Tensor, stop: torch.Tensor) -> torch.Tensor:
        """How many real tokens there are from ``start`` to ``stop``, ``[batch or 1, any]`` each, padding left out."""
        if self.mask is None:
            return stop - start
        before = torch.nn.functional.pad(self.mask.to(start.device).cumsum(dim=1), (1, 0))
        known = before.shape[1] - 1

        def up_to(tokens: torch.Tensor) -> torch.Tensor:
            inside = tokens.expand(len(before), -1).clamp(min=0, max=known)
            return before.gather(1, inside) + (tokens - known).clamp_min(0)

        return up_to(stop) - up_to(start)

    def crop(self, length: int) -> None:
        """Forget what is known of the tokens from ``length`` on."""
        if length == 0:
            self.clear()
        elif self.mask is not None:
            self.mask = self.mask[:, :length]
            # a crop into the moved slots makes every layer unpack: what comes next may order them anew
            self._orders = {
                sink: order for sink, order in self._orders.items() if order is None or order.shape[1] <= length
            }

    def map_rows(self, rows: torch.Tensor) -> None:
        """Replace the batch by the rows of these indices."""
        if self.mask is not None:
            self.mask = self.mask[rows.to(self.mask.device)]
        self._orders = {
            sink: None if order is None else order[rows.to(order.device)] for sink, order in self._orders.items()
        }

    def move(self, device: torch.device) -> None:
        """Move what is known to a device."""
        self.mask = None if self.mask is None else self.mask.to(device)
        self._orders = {sink: None if order is None else order.to(device) for sink, order in self._orders.items()}


def without_padding(states: torch.Tensor, real: torch.Tensor, block_length: int) -> torch.Tensor:
    """Replace padding by a real token of its block, so that it widens no group's range; zeros where there is none.

    ``states`` is ``[batch, heads, tokens, head_dim]``, ``real`` ``[batch, tokens]``.
    """
    blocks = states.unflatten(2, (-1, block_length))
    real = real.unflatten(1, (-1, block_length))[:, None, :, :, None]
    index = real.int().argmax(dim=3, keepdim=True).expand(*blocks.shape[:3], 1, blocks.shape[4])
    substitute = blocks.gather(3, index) * real.any(dim=3, keepdim=True)
    return torch.where(real, blocks, substitute).flatten(2, 3)
