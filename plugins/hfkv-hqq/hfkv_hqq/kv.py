"""The half-quadratic solver of HQQ decides the offset."""

from __future__ import annotations

import torch
from hqq.core.optimize import optimize_weights_proximal_legacy_step as solver_step  # type: ignore[import-untyped]

from hfkv.cache import KVQuantizer, round_to_grid

# what HQQ itself uses
ITERATIONS = 20
BETA = 10.0
LP_NORM = 0.7


class HqqKVQuantizer(KVQuantizer):
    """Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models", 2023.

    The scale spans a group's minimum and maximum; the solver moves the offset so that a few large errors count less
    than many small ones. Every offset that is tried is one that can be stored (float16), and a group keeps the last
    one that lowered its mean absolute error: it is never above round to nearest.

    HQQ stops when the error of the whole tensor no longer falls, so that a row's codes depend on the other rows of
    the batch. Here each group stops by itself, and the groups that have stopped cost nothing.
    """

    name = "hqq"

    def quantize(self, groups: torch.Tensor, nbits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes, scale and offset of each group."""
        low, high = groups.aminmax(dim=-1)
        span = (high - low) / (2**nbits - 1)
        # one element per group: the grid as it will be stored, without the codes
        _, scale, offset = round_to_grid(low.unsqueeze(-1), span, low, nbits)
        rows = groups.flatten(0, -2)
        solved = _solve(rows, scale.float().view(-1, 1), offset.float().view(-1, 1), nbits)
        return round_to_grid(groups, scale, solved.view(low.shape), nbits)


def _solve(rows: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, nbits: int) -> torch.Tensor:
    """The best offset of each row; ``rows`` is ``[groups, group]``, ``scale`` and ``offset`` ``[groups, 1]``."""
    best = offset.clone()
    lowest = torch.full_like(offset, torch.inf)
    active = torch.arange(len(rows), device=rows.device)
    for _ in range(ITERATIONS):
        # HQQ multiplies by the scale's inverse and counts its zero point in codes
        inverse = 1 / scale
        restored, _, zero, _ = solver_step(rows, inverse, -offset * inverse, [0, 2**nbits - 1], BETA, LP_NORM, axis=1)
        error = (rows - restored).abs_().mean(dim=1, keepdim=True)
        improved = (error < lowest).squeeze(1)
        active = active[improved]
        if len(active) == 0:
            break
        best[active] = offset[improved]
        rows, scale, lowest = rows[improved], scale[improved], error[improved]
        offset = (-zero[improved] * scale).half().float()
    return best
