"""How tokens are chosen, and which drafts are accepted: the only place that decides it."""

from __future__ import annotations

import torch


class Noise:
    """Sampling by noise that belongs to a column: ``argmax(score + Gumbel)`` is a draw from ``softmax(score)``.

    The noise of a column depends on the call's seed and on the column alone. So the text depends on the seed alone:
    not on the assistant, nor on how long it drafts, which follows the clock. A drafter that uses the same noise chooses
    the same token with probability at least ``(1 - TV) / (1 + TV)``, TV being the total variation between the two.

    Daliri, Musco, Suresh, "Coupling without Communication and Drafter-Invariant Speculative Decoding", 2024.
    """

    def __init__(self, device: torch.device) -> None:
        # from torch's own generator: `torch.manual_seed` decides
        self._seed = int(torch.randint(2**62, (1,)))
        self._generator = torch.Generator(device)
        self._held: dict[int, torch.Tensor] = {}

    def perturb(self, scores: torch.Tensor, column: int) -> torch.Tensor:
        """Scores ``[rows, vocabulary]`` plus the noise of a column."""
        noise = self._held.get(column)
        if noise is None or noise.shape[-1] < scores.shape[-1]:
            self._generator.manual_seed((self._seed + column * 0x9E3779B97F4A7C15) % 2**63)
            noise = torch.empty(scores.shape, dtype=torch.float32, device=scores.device)
            noise.exponential_(generator=self._generator).clamp_min_(torch.finfo(torch.float32).tiny).log_().neg_()
            self._held[column] = noise
        return scores + noise[..., : scores.shape[-1]]

    def forget(self, column: int) -> None:
        """Drop the noise of all columns before one."""
        for old in [held for held in self._held if held < column]:
            del self._held[old]


def accept_equal(drafts: torch.Tensor, chosen: torch.Tensor, forced: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """How many columns stand, where drafts were not sampled: those before the first that differs from the target's.

    Parameters
    ----------
    drafts
        ``[rows, width - 1]``: known and drafted tokens.
    chosen
        ``[rows, width - 1]``: what the target chooses there.
    forced
        ``[rows]``: how many of the tokens were known before.
    limit
        ``[rows]``: how many are known or drafted.
    """
    return _leading(drafts == chosen, forced, limit)


def accept_sampled(
    drafts: torch.Tensor, scores: torch.Tensor, probabilities: torch.Tensor, forced: torch.Tensor, limit: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept each draft with ``min(1, p / q)``; the token after the last accepted one is drawn from what p has left.

    Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding", 2023.

    Parameters
    ----------
    scores
        ``[rows, width, vocabulary]``, processed.
    probabilities
        ``[rows, width - 1, vocabulary]``: q, what each draft was sampled from.

    Returns
    -------
    tuple
        How many columns stand ``[rows]``, and the token that follows them ``[rows]``.
    """
    target = scores.softmax(dim=-1)
    index = drafts.unsqueeze(-1)
    p = target[:, :-1].gather(-1, index).squeeze(-1)
    q = probabilities.gather(-1, index).squeeze(-1)
    standing = _leading(torch.rand_like(p) * q < p, forced, limit)
    rows = torch.arange(len(drafts), device=drafts.device)
    final = target[rows, standing]
    rejected = standing < limit
    if bool(rejected.any()):
        left = (final - probabilities[rows, standing.clamp(max=probabilities.shape[1] - 1)]).clamp_min(0)
        # q = p to the last bit leaves nothing, and is then never rejected but for rounding
        usable = rejected & (left.sum(dim=-1) > 0)
        final = torch.where(usable[:, None], left, final)
    return standing, torch.multinomial(final, 1).squeeze(-1)


def _leading(same: torch.Tensor, forced: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    places = torch.arange(same.shape[1], device=same.device)
    same = (same | (places < forced[:, None])) & (places < limit[:, None])
    return same.long().cumprod(dim=1).sum(dim=1)
