"""Heads on the target's last hidden state draft, all tokens at once.

Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", 2024.
"""

from __future__ import annotations

from typing import Any

import torch

from hfkv.heads import MedusaHeads
from hfkv.speculation import Block, Tree

from .heads import HeadsDrafter, HeadsOptions, find_heads


class MedusaDrafter(HeadsDrafter):
    """The assistant "medusa"."""

    resources: MedusaHeads

    @classmethod
    def prepare(cls, model: Any, options: HeadsOptions) -> Any:
        """Load the heads, where a folder is given."""
        return find_heads(model, options.heads, MedusaHeads.kind)

    @property
    def most(self) -> int:
        """Each head drafts one token."""
        heads = self.resources.config.num_heads
        if self.options.branches is None:
            return min(self.options.num_assistant_tokens or heads, heads)
        return min(super().most, heads)

    def begin(self, block: Block) -> None:
        """Let the heads read each row's newest hidden state."""
        super().begin(block)
        first = self.hidden.first
        # a row that is ahead was given further than the target's cache now holds
        self._newest = [min(known - 2, self.hidden.end - 1) for known in block.known]
        rows = range(len(self._newest))
        states = self.hidden.columns(first, self.hidden.end)[rows, [newest - first for newest in self._newest]]
        self.hidden.forget(block.cached - 1)
        # the heads of the row furthest behind are the last that are asked for
        self._logits = self.resources(states, self.output, block.width - 1)

    def logits(self, block: Block, column: int) -> torch.Tensor:
        """Of the head of each row that looks as far as this column."""
        last = len(self._logits) - 1
        heads = [min(max(column - newest - 2, 0), last) for newest in self._newest]
        return self._logits[heads, range(len(heads))].float()

    def level(self, block: Block, column: int, tree: Tree, level: list[int]) -> torch.Tensor:
        """The same for all nodes: heads do not know what others chose."""
        return self.logits(block, column).expand(len(level), -1)

    def lengths(self, block: Block) -> list[int]:
        """A row is drafted as far as its heads look."""
        limits = (
            newest + 2 + len(self._logits) - known for newest, known in zip(self._newest, block.known, strict=True)
        )
        return [max(0, min(room, limit)) for room, limit in zip(super().lengths(block), limits, strict=True)]
