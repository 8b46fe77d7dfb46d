"""What drafting heads learn: to say now what the model will say later."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hfkv.heads import MedusaHeads
from hfkv.heads.eagle import shift

from ..chunked import chunked_loss
from ..head import OutputHead
from ..losses import Objective

# the share of each Medusa head in the loss, of the one before it: heads that look further are right less often
DECAY = 0.8
# forwards of the EAGLE head: its own predictions are what it reads from the second token of a draft on
PASSES = 2


class HeadsLoss:
    """The loss of a batch of text, whose logits exist a chunk at a time.

    Parameters
    ----------
    model
        The frozen model.
    heads
        What is trained.
    chunk_size
        Tokens whose logits exist together.
    """

    def __init__(self, model: Any, heads: Any, chunk_size: int = 256) -> None:
        self._heads, self._chunk_size = heads, chunk_size
        self._embed = model.get_input_embeddings()
        self._dtype = model.get_output_embeddings().weight.dtype
        self._finished = OutputHead(model).applied
        self._logits = self._finished(heads.draft_output(model).narrow)
        self._vocabulary = heads.config.draft_vocab_size or heads.config.vocab_size

    def __call__(self, ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """The mean over the tokens.

        Parameters
        ----------
        ids, states
            ``[rows, tokens]`` and ``[rows, tokens, hidden]``: a text, and what the model made of it.
        """
        states = states.float()
        return self._medusa(states) if isinstance(self._heads, MedusaHeads) else self._eagle(ids, states)

    def _medusa(self, states: torch.Tensor) -> torch.Tensor:
        heads, losses = self._heads, []
        for index in range(heads.config.num_heads):
            # head k at t predicts the token t + 2 + k, and so does the model at t + 1 + k
            later = index + 1
            said = heads.blocks[index](states[:, : -later - 1])
            own = heads.lm_heads[index] if heads.config.own_lm_head else None
            losses.append(DECAY**index * self._divergence(said, states[:, later:-1], own))
        return torch.stack(losses).sum() / sum(DECAY**index for index in range(len(losses)))

    def _eagle(self, ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        embeddings = self._embed(ids).detach().float()
        read, total = states, states.new_zeros(())
        for _ in range(PASSES):
            predicted = self._heads(embeddings, shift(read[:, :-1]), use_cache=False)
            near = nn.functional.smooth_l1_loss(predicted, states)
            total = total + near + self._divergence(predicted[:, :-1], states[:, :-1])
            read = predicted
        return total / PASSES

    def _divergence(self, said: torch.Tensor, model: torch.Tensor, own: nn.Module | None = None) -> torch.Tensor:
        """Mean KL of what is said from what the model says, of hidden states ``[rows, tokens, hidden]``.

        Both over the draft vocabulary: the model's distribution, given that the token is one of it.
        """
        said, model = said.flatten(0, 1), model.flatten(0, 1)

        @torch.no_grad()
        def teacher(rows: slice) -> torch.Tensor:
            return self._logits(model[rows].to(self._dtype))

        sums = chunked_loss(
            said,
            self._frozen if own is None else self._finished(own),
            [] if own is None else list(own.parameters()),
            # the text's own tokens have no part in the loss
            torch.zeros(len(said), dtype=torch.long, device=said.device),
            teacher,
            Objective(),
            chunk_size=self._chunk_size,
            vocabulary=self._vocabulary,
        )
        return sums.loss / len(said)

    def _frozen(self, states: torch.Tensor) -> torch.Tensor:
        return self._logits(states.to(self._dtype))
