"""Replace what another library holds, and put it back."""

from __future__ import annotations

import logging
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

_logger = logging.getLogger("hfkv")
_MISSING = object()


@dataclass(frozen=True)
class _Patch:
    """One place that holds something of ours.

    ``original`` is what was there, missing where the owner inherited it from a base class.
    """

    owner: Any
    name: str
    original: Any
    installed: Any

    @property
    def in_place(self) -> bool:
        return _read(self.owner, self.name) is self.installed

    def undo(self) -> None:
        if isinstance(self.owner, MutableMapping):
            if self.original is _MISSING:
                del self.owner[self.name]
            else:
                self.owner[self.name] = self.original
        elif self.original is _MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.original)


# by the owner's identity (the patch keeps the owner alive) and the name in it, in the order in which they were made
_patches: dict[tuple[int, str], _Patch] = {}


def _read(owner: Any, name: str) -> Any:
    return (owner if isinstance(owner, MutableMapping) else vars(owner)).get(name, _MISSING)


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace an attribute (or an item of a mapping) by what ``make`` builds from it, unless ours is there.

    Raises
    ------
    AttributeError, KeyError
        There is nothing of that name.
    """
    done = _patches.get((id(owner), name))
    # a module that was reloaded has its own again
    if done is not None and done.in_place:
        return
    mapping = isinstance(owner, MutableMapping)
    installed = make(owner[name] if mapping else getattr(owner, name))
    original = _read(owner, name)
    if mapping:
        owner[name] = installed
    else:
        setattr(owner, name, installed)
    _patches[id(owner), name] = _Patch(owner, name, original, installed)


def add(mapping: MutableMapping[str, Any], name: str, value: Any) -> None:
    """Add an item to a mapping, unless ours is there.

    Raises
    ------
    ValueError
        Somebody else has added one of that name.
    """
    done = _patches.get((id(mapping), name))
    if done is not None and done.in_place:
        return
    if name in mapping:
        raise ValueError(f"{name!r} is taken, by {mapping[name]!r}")
    mapping[name] = value
    _patches[id(mapping), name] = _Patch(mapping, name, _MISSING, value)


def undo(owner: Any, name: str) -> bool:
    """Undo one replacement; say whether there was any."""
    patch = _patches.pop((id(owner), name), None)
    if patch is not None and patch.in_place:
        patch.undo()
    return patch is not None


def restore() -> None:
    """Undo every replacement, the last first; what somebody else has put there since is theirs and stays."""
    while _patches:
        _, patch = _patches.popitem()
        if patch.in_place:
            patch.undo()
        else:
            place = getattr(patch.owner, "__name__", type(patch.owner).__name__)
            _logger.warning("%s of %s was replaced after hfkv had replaced it, and stays", patch.name, place)
