"""The text that a command works on: a file's, a data set's, or Python's own help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .prompts import long_text

# characters of a data set that are read at most: more than any measurement needs
CHARACTERS = 2_000_000
# what a model was trained on says less of it
HELD_BACK = ("test", "validation", "train")


@dataclass(frozen=True)
class Text:
    """Text and where it comes from.

    Attributes
    ----------
    content
        The text.
    source
        What a report calls it.
    """

    content: str
    source: str


def read(
    file: Path | None = None,
    dataset: str | None = None,
    field: str = "text",
    *,
    splits: Sequence[str] = HELD_BACK,
    characters: int = CHARACTERS,
) -> Text:
    """The text of a file, of a data set on the Hub (``NAME`` or ``NAME:CONFIG``), or Python's own help.

    Parameters
    ----------
    field
        Of the data set's rows.
    splits
        Of the data set the first one that is there; else the first that it has.
    characters
        Of a data set no more than about so many are read.

    Raises
    ------
    ValueError
        Both were given, the text is empty, or the data set has no such field.
    ImportError
        A data set without the package that reads it.
    """
    if file is not None and dataset is not None:
        raise ValueError("--text and --dataset were both given: pass one of them")
    if dataset is not None:
        result = _dataset(dataset, field, splits, characters)
    elif file is not None:
        result = Text(file.read_text(encoding="utf-8"), file.name)
    else:
        result = Text(long_text(), "pydoc_data.topics")
    if not result.content.strip():
        raise ValueError(f"{result.source} has no text")
    return result


def _dataset(name: str, field: str, splits: Sequence[str], characters: int) -> Text:
    try:
        from datasets import get_dataset_split_names, load_dataset
    except ImportError:
        raise ImportError("--dataset needs the package datasets. Fix: pip install datasets") from None
    path, _, config = name.partition(":")
    there = get_dataset_split_names(path, config or None)
    split = next((split for split in splits if split in there), there[0])
    pieces: list[str] = []
    size = 0
    # streaming: a few megabytes of what may be terabytes
    for row in load_dataset(path, config or None, split=split, streaming=True):
        if field not in row:
            raise ValueError(f"the data set {name!r} has no field {field!r}; it has: {', '.join(row)}. Fix: --field")
        pieces.append(str(row[field]))
        size += len(pieces[-1])
        if size >= characters:
            break
    return Text("\n".join(pieces), f"{name}, {split}")
