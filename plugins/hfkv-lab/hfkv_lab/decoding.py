"""Teacher-forced decoding: perplexity, KL to the reference and top-1 agreement, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import Cache

from hfkv.cli.quality import log_probabilities

from . import intervals
from .candidates import Candidate
from .intervals import Estimate


@dataclass
class Losses:
    """What one candidate did on the decoded tokens, a 1-D tensor for each window.

    Attributes
    ----------
    nll
        Negative log-likelihood of the token that follows, in nats.
    kl
        Kullback-Leibler divergence from the reference's prediction, in nats.
    same
        Whether the most likely token is the reference's.
    """

    nll: list[torch.Tensor] = field(default_factory=list)
    kl: list[torch.Tensor] = field(default_factory=list)
    same: list[torch.Tensor] = field(default_factory=list)

    def extend(self, other: Losses) -> None:
        """Add what was measured on another window."""
        self.nll += other.nll
        self.kl += other.kl
        self.same += other.same

    def agreement(self) -> Estimate:
        """The share of tokens that are the same."""
        same = intervals.blocks(self.same)
        return intervals.share_of_sums([int(block.sum()) for block in same], [len(block) for block in same])


def decode(
    candidates: Sequence[Candidate],
    caches: Sequence[Cache],
    window: torch.Tensor,
    prefill: int,
    chunk: int,
) -> list[Losses]:
    """Decode a window from caches that have read its first ``prefill`` tokens; the first candidate is the reference.

    Parameters
    ----------
    window
        ``[1, tokens]``; the last token is only predicted.
    chunk
        Tokens of each forward.
    """
    given, target = window[:, prefill:-1], window[0, prefill + 1 :]
    losses = [Losses() for _ in candidates]
    runs = [
        log_probabilities(candidate.model, given.to(candidate.model.device), 0, cache, chunk)
        for candidate, cache in zip(candidates, caches, strict=True)
    ]
    # all decode in step, so that one chunk's predictions are held and no more
    for expected, predictions in zip(target.split(chunk), zip(*runs, strict=True), strict=True):
        reference = predictions[0][0]
        for loss, predicted in zip(losses, predictions, strict=True):
            found = predicted[0].to(reference.device)
            loss.nll.append(-found.gather(1, expected.to(found.device)[:, None])[:, 0].cpu())
            # a sum of terms of both signs may round to a little below 0
            loss.kl.append((reference.exp() * (reference - found)).sum(-1).clamp(min=0).cpu())
            loss.same.append((found.argmax(-1) == reference.argmax(-1)).cpu())
    return [Losses(*([torch.cat(chunks)] for chunks in (loss.nll, loss.kl, loss.same))) for loss in losses]
