"""How often what followed a match follows again, by the length of the match."""

from __future__ import annotations

import bisect

# matches of so many tokens are counted together, and how often the token after one followed again: SmolLM2's answers to
# ten questions without a text to copy, rounded down
_LENGTHS = (1, 2, 3, 4, 5, 7, 10, 16)
_PRIORS = (0.1, 0.35, 0.45, 0.6, 0.65, 0.8, 0.9, 0.95)
# as if from so many tokens; and the weight of a token, per token of its kind that came after it
_PRIOR_WEIGHT, _MEMORY = 4.0, 0.98


class CopyEvidence:
    """Learns from every token of a call, drafted or not: a copy costs nothing to look at."""

    def __init__(self) -> None:
        self._right = [prior * _PRIOR_WEIGHT for prior in _PRIORS]
        self._seen = [_PRIOR_WEIGHT] * len(_PRIORS)

    def learn(self, length: int, right: bool) -> None:
        """Whether the token after a match of so many tokens followed again."""
        kind = _kind(length)
        self._right[kind] = self._right[kind] * _MEMORY + right
        self._seen[kind] = self._seen[kind] * _MEMORY + 1

    def chance(self, length: int) -> float:
        """The probability that the token after a match of so many tokens follows again."""
        kind = _kind(length)
        return self._right[kind] / self._seen[kind]

    def chances(self, length: int, count: int) -> list[float]:
        """Of the first 1, 2, ... tokens together: each that follows makes the match one longer."""
        found = [0.0] * count
        if length:
            together = 1.0
            for place in range(count):
                together *= self.chance(length + place)
                found[place] = together
        return found


def _kind(length: int) -> int:
    return bisect.bisect(_LENGTHS, length) - 1
