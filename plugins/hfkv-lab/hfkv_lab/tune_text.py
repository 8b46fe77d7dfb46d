"""The texts of a tuning: what is learned on, what the search measures on, and what the result is checked on."""

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
    def described(self) -> str:
        """For the head of a page."""
        return f"{self.input_ids.shape[0]} x {self.decoded} tokens decoded after {self.prefill:,}"

    @property
    def key(self) -> str:
        """What tells it from any other."""
        digest = hashlib.sha256(self.input_ids.cpu().numpy().tobytes()).hexdigest()[:12]
        return f"{self.name} {digest} {self.prefill}"


def samples(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    check: tuple[int, int, int],
    learn: tuple[int, int, int],
    search: tuple[int, int, int],
) -> tuple[Sample, Sample, Sample]:
    """The texts of the check, of learning and of the search, one after the other: none sees another's.

    Parameters
    ----------
    check, learn, search
        Rows, tokens of their prefill, tokens decoded.

    Raises
    ------
    ValueError
        The text, or what the model takes, is too short.
    """
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 2**31
    parts = {"check": check, "learn": learn, "search": search}
    for name, (_, prefill, decoded) in parts.items():
        if prefill + decoded > limit:
            raise ValueError(
                f"--{name}-tokens: {prefill + decoded:,} tokens are more than the {limit:,} that the model takes"
            )
    needed = sum(rows * (prefill + decoded) for rows, prefill, decoded in parts.values())
    # no tokenizer in use needs more characters for prose
    found = tokenizer(text[: 20 * needed], return_tensors="pt", verbose=False).input_ids.to(model.device)
    if found.shape[1] < needed:
        raise ValueError(
            f"--text has {found.shape[1]:,} tokens, and {needed:,} are needed. Fix: a longer text, or fewer "
            f"{', '.join(f'--{name}-tokens' for name in parts)}"
        )
    result, begin = [], 0
    for name, (rows, prefill, decoded) in parts.items():
        end = begin + rows * (prefill + decoded)
        result.append(Sample(name, found[:, begin:end].reshape(rows, -1), prefill))
        begin = end
    return result[0], result[1], result[2]
