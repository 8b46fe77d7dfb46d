"""What a run has measured since it was last asked."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from .chunked import Sums


class Meter:
    """Sums over targets, and the time they took."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all."""
        self._sums: torch.Tensor | None = None
        self._started = time.perf_counter()

    def add(self, loss: torch.Tensor, sums: Sums, targets: int) -> None:
        """Count a batch."""
        parts = [loss, sums.soft, sums.hard, sums.agreed, loss.new_tensor(targets)]
        new = torch.stack([part.detach().double() for part in parts])
        self._sums = new if self._sums is None else self._sums + new

    def results(self, reduce: Callable[[torch.Tensor], torch.Tensor], *, with_teacher: bool) -> dict[str, float]:
        """Means per target, over all processes; empty where nothing was measured.

        Returns
        -------
        dict
            ``loss``, ``ce`` and ``perplexity``; with a teacher ``kl`` (the divergence that is trained) and ``top1``
            (the share of targets for which both have the same favourite); and ``tokens_per_second``.
        """
        if self._sums is None:
            return {}
        loss, soft, hard, agreed, targets = reduce(self._sums).tolist()
        count = max(targets, 1)
        found = {"loss": loss / count, "ce": hard / count, "perplexity": math.exp(min(hard / count, 700))}
        if with_teacher:
            found |= {"kl": soft / count, "top1": agreed / count}
        found["tokens_per_second"] = targets / max(time.perf_counter() - self._started, 1e-9)
        return found
