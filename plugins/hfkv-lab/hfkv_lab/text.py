"""The text that quality is measured on, and windows of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from hfkv.cli.prompts import long_text

# characters of a data set that are read at most: more than any default needs
DATASET_CHARACTERS = 2_000_000


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


def read(file: Path | None = None, dataset: str | None = None, field: str = "text") -> Text:
    """The text of a file, of a data set on the Hub (``NAME`` or ``NAME:CONFIG``), or Python's own help.

    Raises
    ------
    ValueError
        Both were given, or the text is empty.
    """
    if file is not None and dataset is not None:
        raise ValueError("--text and --dataset were both given: pass one of them")
    if dataset is not None:
        result = _dataset(dataset, field)
    elif file is not None:
        result = Text(file.read_text(encoding="utf-8"), file.name)
    else:
        result = Text(long_text(), "pydoc_data.topics")
    if not result.content.strip():
        raise ValueError(f"{result.source} has no text")
    return result


def _dataset(name: str, field: str) -> Text:
    try:
        from datasets import get_dataset_split_names, load_dataset
    except ImportError:
        raise ImportError("--dataset needs the package datasets. Fix: pip install 'hfkv-lab[datasets]'") from None
    path, _, config = name.partition(":")
    there = get_dataset_split_names(path, config or None)
    # what a model was trained on says less
    split = next((split for split in ("test", "validation", "train") if split in there), there[0])
    # streaming: a few megabytes of what may be terabytes
    rows = load_dataset(path, config or None, split=split, streaming=True)
    pieces: list[str] = []
    size = 0
    for row in rows:
        if field not in row:
            raise ValueError(f"the data set {name!r} has no field {field!r}; it has: {', '.join(row)}. Fix: --field")
        pieces.append(str(row[field]))
        size += len(pieces[-1])
        if size >= DATASET_CHARACTERS:
            break
    return Text("\n".join(pieces), f"{name}, {split}")


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens of a text, none added."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return ids


def start(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token that begins every text, for the tokenizers that put one there."""
    added: list[int] = tokenizer("").input_ids
    # some put one at the end too
    return [token for token in added[:1] if token == tokenizer.bos_token_id]


def windows(ids: list[int], count: int, length: int, first: list[int]) -> list[torch.Tensor]:
    """``count`` windows ``[1, length]``, spread evenly over the text; each begins with the tokens ``first``.

    Raises
    ------
    ValueError
        The text is too short for windows that do not overlap.
    """
    own = length - len(first)
    if count < 1 or own < 1:
        raise ValueError(f"windows={count} of {length} tokens: both must be at least 1")
    if count * own > len(ids):
        raise ValueError(
            f"the text has {len(ids):,} tokens, and {count} windows of {length:,} need {count * own:,}. "
            "Fix: a longer text, fewer windows (--windows) or shorter ones (--prefill, --tokens)"
        )
    starts = [index * len(ids) // count for index in range(count)]
    return [torch.tensor([[*first, *ids[start : start + own]]]) for start in starts]
