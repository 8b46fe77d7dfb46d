"""Text to train on, as windows of tokens; its last tenth is held out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hfkv.cli.prompts import long_text

HELD_OUT = 0.1


@dataclass(frozen=True)
class Examples:
    """Windows of a text.

    Attributes
    ----------
    train, held_out
        Examples for `DistillationTrainer`: each ``{"input_ids": [tokens]}``.
    source
        What a report calls the text.
    """

    train: list[dict[str, torch.Tensor]]
    held_out: list[dict[str, torch.Tensor]]
    source: str


def read(file: Path | None, dataset: str | None, field: str, characters: int) -> tuple[str, str]:
    """The text of a file, of a data set on the Hub (``NAME`` or ``NAME:CONFIG``), or Python's own help; and its name.

    Raises
    ------
    ValueError
        Both were given, or a data set without that field.
    """
    if file is not None and dataset is not None:
        raise ValueError("--text and --dataset were both given: pass one of them")
    if dataset is not None:
        return _dataset(dataset, field, characters), dataset
    if file is not None:
        return file.read_text(encoding="utf-8"), file.name
    return long_text(), "pydoc_data.topics"


def _dataset(name: str, field: str, characters: int) -> str:
    try:
        from datasets import load_dataset
    except ImportError:
        raise ImportError("--dataset needs the package datasets. Fix: pip install 'hfkv-distill[datasets]'") from None
    path, _, config = name.partition(":")
    pieces: list[str] = []
    size = 0
    # streaming: a few megabytes of what may be terabytes
    for row in load_dataset(path, config or None, split="train", streaming=True):
        if field not in row:
            raise ValueError(f"the data set {name!r} has no field {field!r}; it has: {', '.join(row)}. Fix: --field")
        pieces.append(str(row[field]))
        size += len(pieces[-1])
        if size >= characters:
            break
    return "\n".join(pieces)


def examples(tokenizer: Any, text: str, source: str, length: int, held_out: int | None = None) -> Examples:
    """Cut a text into windows of ``length`` tokens that do not overlap.

    Parameters
    ----------
    held_out
        Windows of the last tenth that are kept, spread evenly; by default all.

    Raises
    ------
    ValueError
        The text has no window to train on, or none to hold out.
    """
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False).input_ids, dtype=torch.long)
    begin = len(ids) - int(HELD_OUT * len(ids))
    train, rest = (_windows(part, length) for part in (ids[:begin], ids[begin:]))
    if not train or not rest:
        raise ValueError(
            f"{source} has {len(ids):,} tokens, the last tenth held out: too few for windows of {length:,}. "
            "Fix: a longer text, or --length"
        )
    if held_out is not None and held_out < len(rest):
        rest = [rest[index * len(rest) // held_out] for index in range(held_out)]
    return Examples(train, rest, source)


def _windows(ids: torch.Tensor, length: int) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": part} for part in ids.split(length) if len(part) == length]
