"""The text that conversions are decided on, and the text that they are judged on: its last tenth."""

from __future__ import annotations

import torch
from transformers import PreTrainedTokenizerBase

from ..texts import HELD_OUT


def pieces(tokenizer: PreTrainedTokenizerBase, text: str, count: int | None, length: int) -> list[torch.Tensor]:
    """``count`` pieces ``[1, length]`` of a text, spread evenly over it; None: as many as there are.

    Raises
    ------
    ValueError
        The text is too short for pieces that do not overlap.
    """
    return cut(torch.tensor([tokenizer(text, add_special_tokens=False, verbose=False).input_ids]), count, length)


def cut(ids: torch.Tensor, count: int | None, length: int) -> list[torch.Tensor]:
    """``count`` pieces ``[1, length]`` of tokens ``[1, tokens]``, as `pieces` of a text."""
    if count is None:
        count = max(1, ids.shape[1] // length)
    if count * length > ids.shape[1]:
        raise ValueError(
            f"{count} pieces of {length} tokens need {count * length:,}, and this part of the text has "
            f"{ids.shape[1]:,}. Fix: a longer text (--text), or shorter pieces (--tokens)"
        )
    starts = [index * ids.shape[1] // count for index in range(count)]
    return [ids[:, start : start + length] for start in starts]


def split(text: str) -> tuple[str, str]:
    """What conversions may be decided on, and the held-out end."""
    end = int(len(text) * (1 - HELD_OUT))
    return text[:end], text[end:]
