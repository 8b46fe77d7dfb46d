"""What drafting heads learn: to say now what the model will say later."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hfkv.heads import EagleHead, MedusaHeads
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
    chunk_size
        Tokens whose logits exist together.
    """

    def __init__(self, model: Any, chunk_size: int = 256) -> None:
        output = OutputHead(model)
        self._embed = model.get_input_embeddings()
        self._vocabulary, self._chunk_size = output.size, chunk_size
        module: Any = output.module
        self._dtype = module.weight.dtype
        self._output = output
        self._logits = output.applied(module)

    def __call__(self, heads: Any, ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """The mean over the tokens.

        Parameters
        ----------
        ids, states
            ``[rows, tokens]`` and ``[rows, tokens, hidden]``: a text, and what the model made of it.
        """
        states = states.float()
        if isinstance(heads, MedusaHeads):
            return self._medusa(heads, ids, states)
        return self._eagle(heads, ids, states)

    def _medusa(self, heads: MedusaHeads, ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        losses = []
        for index in range(heads.config.num_heads):
            # head k at t predicts the token t + 2 + k, and so does the model at t + 1 + k
            later = index + 1
            said = heads.blocks[index](states[:, : -later - 1])
            own = heads.lm_heads[index] if heads.config.own_lm_head else None
            losses.append(DECAY**index * self._divergence(said, states[:, later:-1], ids[:, later + 1 :], own))
        return torch.stack(losses).sum() / sum(DECAY**index for index in range(len(losses)))

    def _eagle(self, head: EagleHead, ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        embeddings = self._embed(ids).detach().float()
        read, total = states, states.new_zeros(())
        for _ in range(PASSES):
            predicted = head(embeddings, shift(read[:, :-1]), use_cache=False)
            near = nn.functional.smooth_l1_loss(predicted, states)
            total = total + near + self._divergence(predicted[:, :-1], states[:, :-1], ids[:, 1:], None)
            read = predicted
        return total / PASSES

    def _divergence(
        self, said: torch.Tensor, model: torch.Tensor, labels: torch.Tensor, own: nn.Module | None
    ) -> torch.Tensor:
        """Mean KL of what is said from what the model says, of hidden states ``[rows, tokens, hidden]``."""
        model = model.flatten(0, 1)

        @torch.no_grad()
        def teacher(rows: slice) -> torch.Tensor:
            return self._logits(model[rows].to(self._dtype))

        sums = chunked_loss(
            said.flatten(0, 1),
            self._frozen if own is None else self._output.applied(own),
            [] if own is None else list(own.parameters()),
            labels.flatten(),
            teacher,
            Objective(),
            chunk_size=self._chunk_size,
            vocabulary=self._vocabulary,
        )
        return sums.loss / labels.numel()

    def _frozen(self, states: torch.Tensor) -> torch.Tensor:
        return self._logits(states.to(self._dtype))
