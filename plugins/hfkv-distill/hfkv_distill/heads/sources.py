"""The tokens that drafting heads learn from, and the beginnings that they are judged on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from hfkv.cli.prompts import long_text

from ..conversions.texts import cut, pieces, split
from ..texts import HELD_OUT
from .answers import answers


@dataclass(frozen=True, kw_only=True)
class Source:
    """A text, or prompts that the model answers itself; Python's own help without either.

    Attributes
    ----------
    text, prompts
        Files: a text, or one prompt a line.
    answer_tokens
        Tokens of an answer, at most.
    tokens
        Tokens of a row.
    judged, prompt_tokens
        How many beginnings of the held-out end there are, and how long each is.
    """

    text: Path | None = None
    prompts: Path | None = None
    answer_tokens: int = 192
    tokens: int = 256
    judged: int = 8
    prompt_tokens: int = 64
    seed: int = 0

    def read(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What is learned ``[rows, tokens]``, and the beginnings ``[judged, prompt tokens]``.

        Raises
        ------
        ValueError
            There is too little text.
        """
        if self.prompts is None:
            learned, held_out = split(long_text() if self.text is None else self.text.read_text(encoding="utf-8"))
            rows = pieces(tokenizer, learned, None, self.tokens)
            return torch.cat(rows), torch.cat(pieces(tokenizer, held_out, self.judged, self.prompt_tokens))
        lines = self.prompts.read_text(encoding="utf-8").splitlines()
        asked = [line.strip() for line in lines if line.strip()]
        said = answers(model, tokenizer, asked, self.answer_tokens, seed=self.seed, progress=progress)
        end = int(len(said) * (1 - HELD_OUT))
        rows = cut(_joined(said[:end]), None, self.tokens)
        return torch.cat(rows), torch.cat(cut(_joined(said[end:]), self.judged, self.prompt_tokens))


def _joined(rows: list[list[int]]) -> torch.Tensor:
    return torch.tensor([[token for row in rows for token in row]], dtype=torch.long)
