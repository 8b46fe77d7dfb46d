"""A decoder layer that predicts the target's next hidden states drafts.

Li, Wei, Zhang, Zhang, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", 2024.
"""

from __future__ import annotations

from typing import Any

import torch

from hfkv import decoding
from hfkv.heads import EagleHead
from hfkv.heads.eagle import shift
from hfkv.speculation import Block, Call, RolloutDrafter, Tree

from .heads import HeadsDrafter, HeadsOptions, find_heads


class EagleDrafter(HeadsDrafter, RolloutDrafter):
    """The assistant "eagle".

    The head's own cache holds what it made of the target's hidden states; what it made of predicted ones is taken back
    after each draft.
    """

    resources: EagleHead

    def __init__(self, call: Call, options: HeadsOptions, resources: Any) -> None:
        super().__init__(call, options, resources)
        # the first column that the head was given: a cache from before this call comes without hidden states
        self._first = 0
        # columns of the head's cache that come of the target's hidden states
        self._settled = 0
        # hidden states that the head predicted: of the newest column, then of the nodes of a tree
        self._predicted = torch.empty(0)
        # of that column: what it sees, and its position
        self._mask: torch.Tensor | None = None
        self._position = torch.empty(0)

    @classmethod
    def prepare(cls, model: Any, options: HeadsOptions) -> Any:
        """Load the head, where a folder is given."""
        return find_heads(model, options.heads, EagleHead.kind)

    def draft_model(self) -> Any:
        """The layers of the head."""
        return self.resources.decoder

    def draft_cache(self) -> Any:
        """A cache of the head's own."""
        return decoding.draft_cache(self.model)

    def rewind(self, block: Block) -> None:
        """Take back what came of predicted hidden states."""
        if self.fed == 0:
            self._first = self.fed = self._settled = max(0, self.hidden.first)
        self.cache.crop(self._settled - self.fed)
        self.fed = self._settled

    def logits(self, block: Block, column: int) -> torch.Tensor:
        """Predict the hidden state of the column before; logits are read off it."""
        start, stop = self.fed, column
        if start <= block.cached:
            before = self._target_states(block, start, stop)
            self._settled = stop
        else:
            before = self._predicted
        arguments = decoding.positions(self.model, block.kwargs, block.cached + 1, start, stop, -self._first)
        self._mask = arguments.get("attention_mask")
        self._position = arguments.get("position_ids", block.ids.new_tensor([[stop - 1 - self._first]]))[:, -1:]
        self.fed = stop
        self._predicted = self._predict(block.ids[:, start:stop], before, arguments)[:, -1:]
        return self._read(self._predicted[:, -1])

    def level(self, block: Block, column: int, tree: Tree, level: list[int]) -> torch.Tensor:
        """Give the head the nodes, each of which sees its ancestors alone."""
        if level == [-1]:
            return self.logits(block, column)
        given = len(tree.tokens)
        sees = tree.sees()[[node + 1 for node in level], 1 : given + 1]
        past = block.ids.new_ones(self._settled - self._first) if self._mask is None else self._mask[0]
        positions = self._position + column - 1 - block.cached
        arguments = decoding.tree_inputs(past, sees, positions.expand(1, len(level)), self.model.dtype)
        before = self._predicted[:, [tree.parents[node] + 1 for node in level]]
        tokens = block.ids.new_tensor([[tree.tokens[node] for node in level]])
        self.fed += len(level)
        hidden = self._predict(tokens, before, arguments)
        self._predicted = torch.cat([self._predicted, hidden], dim=1)
        return self._read(hidden[0])

    def _predict(self, tokens: torch.Tensor, before: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
        embeddings = self.call.model.get_input_embeddings()(tokens)
        cached = {self.cache_argument: self.cache, "use_cache": True}
        hidden: torch.Tensor = self.resources(embeddings, before, **arguments, **cached)
        return hidden

    def _read(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.output(hidden)
        return logits.float()

    def _target_states(self, block: Block, start: int, stop: int) -> torch.Tensor:
        """The hidden state before each column, the target's own."""
        if start > self._first:
            states = self.hidden.columns(start - 1, stop - 1)
        else:
            states = self.hidden.columns(start, stop - 1)
            mask = block.kwargs.get("attention_mask")
            states = shift(states, None if mask is None else mask[:, -block.cached - 1 :][:, start : stop - 1])
        self.hidden.forget(stop - 2)
        return states
