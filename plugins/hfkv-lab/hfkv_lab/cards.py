"""Cards by name: memory, bandwidth and dense 16-bit matrix products, from the vendors' data sheets."""

from __future__ import annotations

from dataclasses import dataclass

from .arguments import choose


@dataclass(frozen=True)
class Card:
    """What a roofline needs to know of a card.

    Attributes
    ----------
    memory
        Bytes.
    bandwidth
        Bytes a second between the memory and the processor.
    flops
        Operations a second in 16 bits, dense, accumulated in 32.
    """

    name: str
    memory: float
    bandwidth: float
    flops: float


CARDS = {
    card.name: card
    for card in (
        Card("t4", 16e9, 320e9, 65e12),
        Card("l4", 24e9, 300e9, 121e12),
        Card("rtx-3090", 24e9, 936e9, 71e12),
        Card("rtx-4090", 24e9, 1008e9, 165e12),
        Card("l40s", 48e9, 864e9, 362e12),
        Card("a100-40gb", 40e9, 1555e9, 312e12),
        Card("a100-80gb", 80e9, 2039e9, 312e12),
        Card("h100", 80e9, 3.35e12, 989e12),
        Card("h200", 141e9, 4.8e12, 989e12),
    )
}


def find_card(name: str) -> Card:
    """The card of that name.

    Raises
    ------
    ValueError
        Another name.
    """
    return choose("--card", name.lower().replace(" ", "-"), CARDS, "; or give --memory, --bandwidth and --flops")
