"""Layers as a user writes them: ``"0"``, ``"-1"`` or ``"1-3"``."""

from __future__ import annotations

import re


def layer_indices(key: object, count: int) -> range:
    """The layers that a key of the option ``layers`` names, of a model with ``count`` layers.

    Raises
    ------
    ValueError
        Not of this form, or outside the model.
    """
    match = re.fullmatch(r"(-?\d+)(?:-(\d+))?", str(key).strip())
    if match is None:
        raise ValueError(f"layers[{key!r}]: write a layer as '0' or '-1', or a range as '1-3'")
    first = int(match[1])
    first = first + count if first < 0 else first
    last = first if match[2] is None else int(match[2])
    if not 0 <= first <= last < count:
        raise ValueError(f"layers[{key!r}] is outside this model's layers 0 to {count - 1}")
    return range(first, last + 1)
