"""The texts of a tuning: what is learned on, what the search measures on, and what the result is checked on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from . import text

# of the text that are read: more than any default needs
CHARACTERS = 2_000_000


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
    content: str,
    sizes: Mapping[str, tuple[int, int, int]],
) -> dict[str, Sample]:
    """Samples of a text, the rows of all spread over it by turns; no token is in two of them.

    Parameters
    ----------
    sizes
        Of each sample, by its name: rows, tokens of their prefill, tokens decoded.

    Raises
    ------
    ValueError
        The text, or what the model takes, is too short.
    """
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 2**31
    for name, (_, prefill, decoded) in sizes.items():
        if prefill + decoded > limit:
            raise ValueError(
                f"--{name}-tokens: {prefill + decoded:,} tokens are more than the {limit:,} that the model takes"
            )
    ids, first = text.encode(tokenizer, content[:CHARACTERS]), text.start(tokenizer)
    own = {name: prefill + decoded - len(first) for name, (_, prefill, decoded) in sizes.items()}
    needed = sum(rows * own[name] for name, (rows, _, _) in sizes.items())
    if len(ids) < needed:
        raise ValueError(
            f"--text has {len(ids):,} tokens, and {needed:,} are needed. Fix: a longer text, or fewer "
            f"{', '.join(f'--{name}-tokens' for name in sizes)}"
        )
    # each sample's rows evenly over the text, so that none has a chapter to itself
    order = sorted((((row + 0.5) / rows, name) for name, (rows, _, _) in sizes.items() for row in range(rows)))
    gap = (len(ids) - needed) // len(order)
    found: dict[str, list[list[int]]] = {name: [] for name in sizes}
    begin = 0
    for _, name in order:
        end = begin + own[name]
        found[name].append([*first, *ids[begin:end]])
        begin = end + gap
    return {name: Sample(name, torch.tensor(rows, device=model.device), sizes[name][1]) for name, rows in found.items()}
