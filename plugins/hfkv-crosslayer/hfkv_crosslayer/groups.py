"""Which layers share: groups of layer indices, the first of each the donor. Plain lists, so that they can be saved."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

# the first layer of a group computes and stores; the others read
Groups = list[list[int]]


def neighbours(kinds: Mapping[int, Hashable], share: int) -> Groups:
    """Groups of ``share`` layers, each with the next ones of its kind; the last group of a kind may be smaller.

    Parameters
    ----------
    kinds
        The kind of each layer: layers of different kinds see different tokens and cannot share.
    """
    of_kind: dict[Hashable, list[int]] = {}
    for index in sorted(kinds):
        of_kind.setdefault(kinds[index], []).append(index)
    groups = [indices[start : start + share] for indices in of_kind.values() for start in range(0, len(indices), share)]
    return sorted(groups)


def checked(groups: Any, kinds: Mapping[int, Hashable]) -> Groups:
    """A user's groups, with each layer that they do not name in a group of its own.

    Raises
    ------
    ValueError
        No lists of layers, an unknown layer, one that is named twice, a group in no rising order or of several kinds.
    """
    if not isinstance(groups, Sequence) or isinstance(groups, str) or not all(_is_group(group) for group in groups):
        raise ValueError(f"groups={groups!r} must be lists of layers, e.g. [[0], [1, 2], [3, 4, 5]]")
    named: set[int] = set()
    for group in groups:
        for index in group:
            if index not in kinds:
                raise ValueError(f"groups={groups!r}: layer {index} cannot share. Layers that can: {sorted(kinds)}")
            if index in named:
                raise ValueError(f"groups={groups!r}: layer {index} is named twice")
            named.add(index)
        if list(group) != sorted(group):
            raise ValueError(
                f"groups={groups!r}: a layer reads what an earlier one has computed, so write {sorted(group)}"
            )
        if len({kinds[index] for index in group}) > 1:
            listed = ", ".join(f"{index} ({_words(kinds[index])})" for index in group)
            raise ValueError(
                f"groups={groups!r}: layers of one group must see the same tokens, and these do not: {listed}"
            )
    return sorted([*(list(group) for group in groups), *([index] for index in kinds if index not in named)])


def donors(groups: Groups) -> dict[int, int]:
    """The layer that each borrowing layer reads."""
    return {index: group[0] for group in groups for index in group[1:]}


def _is_group(group: Any) -> bool:
    return isinstance(group, Sequence) and bool(group) and all(type(index) is int for index in group)


def _words(kind: Hashable) -> str:
    return " ".join(map(str, kind)) if isinstance(kind, tuple) else str(kind)
