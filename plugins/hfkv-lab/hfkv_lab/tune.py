"""Find the cheapest setting of each layer within a budget.

Per-layer sensitivities, then one multiple-choice knapsack, as mixed-precision weight quantization does it (Dong et al.,
"HAWQ: Hessian AWare Quantization of Neural Networks with Mixed-Precision", 2019; here the divergence is measured, not
estimated from curvature). Divergences of single layers add up well while they are small; what they leave out is
corrected by measuring the candidates whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .knapsack import Choice, solve
from .tune_space import WIDTHS, LayerChoice, Shared, Sizes, Space, cache_config

# the divergence of a cache_config, on a text of its own
Measure = Callable[[dict[str, Any]], float]

# candidates that a search measures for each shared setting, each time correcting its prediction by what was found
ROUNDS = 5
# what is aimed at, of the limit, once it has been missed: a candidate just above it is lost
AIM = 0.98
# of the limit: a candidate above this share of it is near enough
NEAR = 0.95
# widest first: the cost of 8 bits is measured for all layers at once
_PRECISE = max(WIDTHS)


@dataclass(frozen=True)
class Budget:
    """What must hold, and what is made small under it.

    Attributes
    ----------
    kind
        ``"kl"``: divergence at most ``limit``, fewest bits. ``"bits"``: bits per element at most ``limit``, least
        divergence.
    """

    kind: str
    limit: float


@dataclass(frozen=True)
class Candidate:
    """A setting of all layers, and what `Tuner`'s ``measure`` found for it."""

    shared: Shared
    choices: dict[int, LayerChoice]
    bits: float
    kl: float


@dataclass(frozen=True)
class Sensitivity:
    """Divergence when one layer's keys, or its values, alone have so many bits."""

    layer: int
    part: str
    nbits: int
    kl: float


class Tuner:
    """Measures and searches.

    Parameters
    ----------
    learn, measure
        Measure what single layers cost, and candidates whole: many on a short text, and few on a longer one. What
        ``measure`` returns is held against the budget; it may be the upper end of an interval.
    step
        Called with what is measured next, and after each measurement with None.
    """

    def __init__(
        self,
        space: Space,
        sizes: Sizes,
        learn: Measure,
        measure: Measure,
        step: Callable[[str | None], None] = lambda text: None,
    ) -> None:
        self.space, self.sizes, self._step = space, sizes, step
        self._learn, self._measure = learn, measure
        self.sensitivities: list[Sensitivity] = []
        # divergences as measured, in those that were predicted, of the latest candidate of each shared setting
        self._ratio: dict[Shared, float] = {}

    @property
    def measurements(self) -> int:
        """How many measurements come before the search."""
        widths = len(WIDTHS) - 1
        shared = len(list(self.space.shared()))
        return len(self.sizes.layers) * 2 * widths + 2 * widths * len(self.space.group_sizes) + 1 + shared

    def _score(self, measure: Measure, text: str, options: dict[str, Any]) -> float:
        self._step(text)
        found = max(measure(options), 0.0)
        self._step(None)
        return found

    def _everywhere(self, **changes: int) -> LayerChoice:
        usual = {"key_nbits": _PRECISE, "value_nbits": _PRECISE, "group_size": self.space.group_sizes[0]}
        return LayerChoice(**{**usual, **changes})

    def learn(self) -> None:
        """Measure what the search needs to know."""
        start, first = self.space.start, self.space.group_sizes[0]
        precise = self._score(self._learn, "8 bits everywhere", self.space.options(start, self._everywhere()))
        self._cost = {}
        for part in ("key", "value"):
            for index in self.sizes.layers:
                self._cost[index, part, _PRECISE] = precise / len(self.sizes.layers) / 2
                for nbits in WIDTHS[:-1]:
                    options = self.space.options(start, self._everywhere(**{f"{part}_nbits": nbits}))
                    kept = {str(other): "dynamic" for other in self.sizes.layers if other != index}
                    found = self._score(
                        self._learn, f"layer {index}: {part}s in {nbits} bits", {**options, "layers": kept}
                    )
                    self._cost[index, part, nbits] = found
                    self.sensitivities.append(Sensitivity(index, part, nbits, found))
        self._group: dict[tuple[str, int, int], float] = {}
        for part in ("key", "value"):
            for nbits in WIDTHS[:-1]:
                whole = {
                    group: self._score(
                        self._learn,
                        f"all {part}s in {nbits} bits, groups of {group}",
                        self.space.options(start, self._everywhere(**{f"{part}_nbits": nbits, "group_size": group})),
                    )
                    for group in self.space.group_sizes
                }
                for group, found in whole.items():
                    self._group[part, nbits, group] = found / max(whole[first], 1e-12)
        middle = self._everywhere(key_nbits=WIDTHS[1], value_nbits=WIDTHS[1])
        found_by = {
            shared: self._score(
                self._learn,
                f"residual {shared.residual_length}, sinks {shared.sink_length}, {shared.backend}",
                self.space.options(shared, middle),
            )
            for shared in self.space.shared()
        }
        self._shared = {shared: found / max(found_by[start], 1e-12) for shared, found in found_by.items()}

    def _items(self, shared: Shared) -> list[list[Choice]]:
        return [
            [
                Choice(
                    choice, self.sizes.of(shared, choice, index), self._shared[shared] * self._predict(index, choice)
                )
                for choice in self.space.layer_choices()
            ]
            for index in self.sizes.layers
        ]

    def _predict(self, index: int, choice: LayerChoice) -> float:
        total = 0.0
        for part, nbits in (("key", choice.key_nbits), ("value", choice.value_nbits)):
            total += self._cost[index, part, nbits] * self._group.get((part, nbits, choice.group_size), 1.0)
        return total

    def search(self, budget: Budget) -> list[Candidate]:
        """Candidates within the budget on the text of the search, the best first; empty where there is none."""
        found = [candidate for shared in self.space.shared() for candidate in self._search(shared, budget)]
        return _sorted(found, budget)

    def _search(self, shared: Shared, budget: Budget) -> list[Candidate]:
        items = self._items(shared)
        if budget.kind == "bits":
            # the same problem with the roles exchanged
            swapped = [[Choice(choice.label, choice.cost, choice.size) for choice in choices] for choices in items]
            taken = solve(swapped, budget.limit * self.sizes.elements / 8)
            return [] if taken is None else [self._candidate(shared, taken)]
        found = []
        low, high = 0.0, float("inf")
        for _ in range(ROUNDS):
            aim = (AIM if high < float("inf") else 1.0) * budget.limit / self._ratio.get(shared, 1.0)
            if not low < aim < high:
                # predicted and measured are nearly proportional, and here they are not: halve what is left
                aim = (low + high) / 2 if high < float("inf") else 2 * low
            taken = solve(items, aim)
            if taken is None:
                break
            candidate = self._candidate(shared, taken)
            self._ratio[shared] = max(candidate.kl, 1e-12) / max(sum(choice.cost for choice in taken), 1e-12)
            if candidate.kl > budget.limit:
                high = min(high, aim)
                continue
            found.append(candidate)
            low = max(low, aim)
            if candidate.kl >= NEAR * budget.limit:
                break
        return found

    def _candidate(self, shared: Shared, taken: list[Choice]) -> Candidate:
        choices = {index: choice.label for index, choice in zip(self.sizes.layers, taken, strict=True)}
        options = cache_config(self.space, shared, choices)
        bits = self.sizes.bits(shared, choices)
        kl = self._score(self._measure, f"candidate: {bits:.2f} bits, residual {shared.residual_length}", options)
        return Candidate(shared, choices, bits, kl)

    def options(self, candidate: Candidate) -> dict[str, Any]:
        """The ``cache_config`` of a candidate."""
        return cache_config(self.space, candidate.shared, candidate.choices)


def _sorted(found: list[Candidate], budget: Budget) -> list[Candidate]:
    """The best first."""
    if budget.kind == "bits":
        return sorted(found, key=lambda candidate: (candidate.kl, candidate.bits))
    return sorted(found, key=lambda candidate: (candidate.bits, candidate.kl))


def sensitivity_table(found: list[Sensitivity]) -> dict[int, Mapping[str, float]]:
    """By layer: the divergence of each part and width, under names such as ``"key 2"``."""
    result: dict[int, dict[str, float]] = {}
    for one in found:
        result.setdefault(one.layer, {})[f"{one.part} {one.nbits}"] = one.kl
    return dict(result)
