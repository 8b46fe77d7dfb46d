"""What a command line says in a word: one of several names, or a quantity with a unit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from hfkv import registry

Known = TypeVar("Known")


def choose(option: str, name: str, known: Mapping[str, Known], otherwise: str = "") -> Known:
    """What has that name.

    Parameters
    ----------
    otherwise
        What to do where none of the names will do.

    Raises
    ------
    ValueError
        Another name.
    """
    if name not in known:
        closest = registry.closest(name, known)
        raise ValueError(f"{option} {name!r} is not known. Choose from: {', '.join(known)}{otherwise}.{closest}")
    return known[name]


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
