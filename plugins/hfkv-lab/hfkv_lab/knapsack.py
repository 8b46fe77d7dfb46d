"""One choice for each item, the smallest total size within a total cost: by Lagrange multiplier.

For every price of cost against size, each item takes its cheapest choice on its own; raising the price walks along the
convex hull of what is possible. What the walk leaves of the budget is spent greedily at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Choice:
    """What an item may be.

    Attributes
    ----------
    size
        To be as small as possible in total.
    cost
        To stay within the budget in total.
    """

    label: Any
    size: float
    cost: float


def solve(items: Sequence[Sequence[Choice]], budget: float) -> list[Choice] | None:
    """One choice of each item; None where even the cheapest are beyond the budget."""
    taken = [min(choices, key=lambda choice: (choice.cost, choice.size)) for choices in items]
    if _cost(taken) > budget:
        return None
    low, high = 0.0, 1.0
    while _cost(_at(items, high)) > budget and high < 1e30:
        low, high = high, high * 4
    for _ in range(80):
        middle = (low + high) / 2
        if _cost(_at(items, middle)) > budget:
            low = middle
        else:
            high = middle
    found = _at(items, high)
    return _spend(items, found if _cost(found) <= budget else taken, budget)


def _at(items: Sequence[Sequence[Choice]], price: float) -> list[Choice]:
    return [min(choices, key=lambda choice: (choice.size + price * choice.cost, choice.cost)) for choices in items]


def _spend(items: Sequence[Sequence[Choice]], taken: list[Choice], budget: float) -> list[Choice]:
    """Swap single choices, the one that saves most first, as long as the budget holds."""
    taken = list(taken)
    while True:
        left = budget - _cost(taken)
        swaps = [
            (taken[index].size - choice.size, index, choice)
            for index, choices in enumerate(items)
            for choice in choices
            if choice.size < taken[index].size and choice.cost - taken[index].cost <= left
        ]
        if not swaps:
            return taken
        _, index, choice = max(swaps, key=lambda swap: swap[0])
        taken[index] = choice


def _cost(taken: Sequence[Choice]) -> float:
    return sum(choice.cost for choice in taken)
