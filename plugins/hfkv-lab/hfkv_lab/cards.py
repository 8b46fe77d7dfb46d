"""Cards by name: memory, bandwidth and dense 16-bit matrix products, from the vendors' data sheets."""

from __future__ import annotations

from dataclasses import dataclass

from hfkv import registry


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
    key = name.lower().replace(" ", "-")
    if key not in CARDS:
        raise ValueError(
            f"--card {name!r} is not known. Choose from: {', '.join(CARDS)}.{registry.closest(key, CARDS)} "
            "Or give --memory, --bandwidth and --flops"
        )
    return CARDS[key]


_UNITS = {
    "": 1.0,
    "k": 1e3,
    "m": 1e6,
    "g": 1e9,
    "t": 1e12,
    "p": 1e15,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


def parse_quantity(option: str, text: str, plain: float, units: tuple[str, ...]) -> float:
    """``"80GB"``, ``"3.35TB/s"`` or ``"989T"`` as a number.

    Parameters
    ----------
    option
        For the message.
    plain
        What a number without a unit is multiplied by.
    units
        What may follow the prefix, in lower case.

    Raises
    ------
    ValueError
        No such number, or not above zero.
    """
    stripped = text.strip().replace("_", "").lower()
    digits = stripped.rstrip("abcdefghijklmnopqrstuvwxyz/ ")
    # 1e9 is a number, and its e no unit
    rest = stripped[len(digits) :].strip()
    for unit in sorted(units, key=len, reverse=True):
        if rest.endswith(unit) and rest:
            prefix = rest.removesuffix(unit)
            break
    else:
        prefix = rest
    try:
        factor = plain if not rest else _UNITS[prefix]
        value = float(digits) * factor
    except (KeyError, ValueError):
        value = 0.0
    if not value > 0:
        shown = {"b": "80GB or 24GiB", "b/s": "3.35TB/s", "flop/s": "989T"}[units[0]]
        raise ValueError(f"{option} {text!r} is not a quantity above zero; write it as {shown}")
    return value
