"""Text to train on, as windows of tokens; its last tenth is held out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

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
