"""The texts of a tuning: what the search measures on, and what the result is checked on, which do not overlap."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Sample:
    """Tokens to score caches on.

    Attributes
    ----------
    input_ids
        ``[rows, prefill + decoded]``.
    """

    name: str
    input_ids: torch.Tensor
    prefill: int

    @property
    def decoded(self) -> int:
        """Tokens of each row that are scored."""
        return self.input_ids.shape[1] - self.prefill

    @property
    def key(self) -> str:
        """What tells it from any other."""
        digest = hashlib.sha256(self.input_ids.cpu().numpy().tobytes()).hexdigest()[:12]
        return f"{self.name} {digest} {self.prefill}"


def samples(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    search: tuple[int, int, int],
    check: tuple[int, int],
) -> tuple[Sample, Sample]:
    """The text of the search and that of the check: the check's is the beginning, the search's rows follow.

    Parameters
    ----------
    search
        Rows, tokens of their prefill, tokens decoded.
    check
        Tokens of the prefill, tokens decoded.

    Raises
    ------
    ValueError
        The text, or what the model takes, is too short.
    """
    rows, prefill, decoded = search
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 2**31
    for option, length in (("--search-tokens", prefill + decoded), ("--check-tokens", sum(check))):
        if length > limit:
            raise ValueError(f"{option}: {length:,} tokens are more than the {limit:,} that the model takes")
    needed = rows * (prefill + decoded) + sum(check)
    # no tokenizer in use needs more characters for prose
    found = tokenizer(text[: 20 * needed], return_tensors="pt").input_ids
    if found.shape[1] < needed:
        raise ValueError(
            f"--text has {found.shape[1]:,} tokens, and {needed:,} are needed. Fix: a longer text, or fewer "
            "--search-tokens and --check-tokens"
        )
    begin = sum(check)
    piece = found[:, begin : begin + rows * (prefill + decoded)].reshape(rows, -1)
    return (
        Sample("search", piece.to(model.device), prefill),
        Sample("check", found[:, :begin].to(model.device), check[0]),
    )
