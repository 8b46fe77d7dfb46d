"""What all drafting heads have in common: a kind, a config of plain numbers, and a model that they fit."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Self

import torch
from torch import nn

from .rows import Rows, kept_rows


class DraftHeads(nn.Module):
    """Heads that read the last hidden state of a model: what its output embedding reads, after the last norm.

    They hold none of the model's own weights: its embeddings are given to each call.

    Parameters
    ----------
    config
        An instance of ``Config``.

    Attributes
    ----------
    draft_vocabulary
        The tokens that are drafted, ``[config.draft_vocab_size]``; None for all. Zhao et al., "FR-Spec: Accelerating
        Large-Vocabulary Language Models via Frequency-Ranked Speculative Sampling", 2025: a draft then reads a part of
        the output embedding, and a token outside is never drafted, only chosen by the model itself.
    """

    kind: ClassVar[str]
    Config: ClassVar[type[Any]]
    draft_vocabulary: torch.Tensor | None

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        size = config.draft_vocab_size
        if size is not None and not 1 <= size <= config.vocab_size:
            raise ValueError(f"draft_vocab_size={size!r} must be from 1 to vocab_size={config.vocab_size}, or None")
        self.register_buffer("draft_vocabulary", None if size is None else torch.arange(size))

    @classmethod
    @abstractmethod
    def for_model(cls, model: Any, **options: Any) -> Self:
        """Heads, untrained, of the model's sizes, dtype and device; ``options`` are fields of ``Config``."""

    def draft_output(self, model: Any) -> DraftOutput:
        """What makes of hidden states the logits that are drafted from.

        Rows of the output embedding that a draft vocabulary picks are copied once, kept with the heads, and copied anew
        when the embedding changes.
        """
        return DraftOutput(
            model.get_output_embeddings(), self.config.vocab_size, self.draft_vocabulary, kept_rows(self, model)
        )

    def check(self, model: Any) -> None:
        """Raise ValueError where the heads were made for a model of other sizes."""
        expected = sizes(model)
        for name, value in expected.items():
            if getattr(self.config, name) != value:
                raise ValueError(
                    f"these {self.kind} heads have {name}={getattr(self.config, name)}, and {type(model).__name__} has "
                    f"{value}: they were trained for another model"
                )


def sizes(model: Any) -> dict[str, int]:
    """What heads have to share with their model."""
    vocabulary, hidden = model.get_output_embeddings().weight.shape
    return {"hidden_size": int(hidden), "vocab_size": int(vocabulary)}


# the logit of a token that is not drafted: finite, so that a distribution is left where all others are forbidden
_IMPOSSIBLE = -1e4


class DraftOutput:
    """A model's output embedding, of which only the rows that are drafted are read.

    Parameters
    ----------
    lm_head
        From hidden states ``[..., hidden_size]`` to logits ``[..., vocab_size]``.
    vocab_size
        Tokens that there are.
    draft_vocabulary
        Those that are drafted; None for all.
    rows
        A copy of their rows, so that a draft does not gather them again; None where the layer is computed whole.
    """

    def __init__(
        self, lm_head: Any, vocab_size: int, draft_vocabulary: torch.Tensor | None, rows: Rows | None = None
    ) -> None:
        self._lm_head, self._vocab_size, self._kept, self._rows = lm_head, vocab_size, draft_vocabulary, rows

    def narrow(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits of the draft vocabulary alone, ``[..., draft_vocab_size]``."""
        if self._rows is not None:
            return nn.functional.linear(hidden_states, *self._rows)
        # packed weights, or a layer of another kind: whole, then a part of it
        logits: torch.Tensor = self._lm_head(hidden_states)
        return logits if self._kept is None else logits[..., self._kept]

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits ``[..., vocab_size]``; a token that is not drafted is impossible."""
        logits = self.narrow(hidden_states)
        if self._kept is None:
            return logits
        wide = logits.new_full((*logits.shape[:-1], self._vocab_size), _IMPOSSIBLE)
        return wide.index_copy_(-1, self._kept, logits)
