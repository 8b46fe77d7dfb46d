"""Tokens of the text that quality is measured on, and windows of it."""

from __future__ import annotations

import torch
from transformers import PreTrainedTokenizerBase


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
