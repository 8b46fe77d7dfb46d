"""Heads that each look one token further, all from one hidden state.

Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", 2024.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import nn

from .base import DraftHeads, sizes

Output = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class MedusaConfig:
    """The shape of `MedusaHeads`.

    Attributes
    ----------
    hidden_size, vocab_size
        The model's.
    num_heads
        Tokens that are drafted at once.
    num_layers
        Residual blocks of each head.
    own_lm_head
        Whether each head has an output embedding of its own, as in the paper (``vocab_size * hidden_size`` weights
        each); False: all read the model's.
    draft_vocab_size
        Tokens that are drafted (`DraftHeads.draft_vocabulary`); None for all, which heads with output embeddings of
        their own need.
    """

    hidden_size: int
    vocab_size: int
    num_heads: int = 4
    num_layers: int = 1
    own_lm_head: bool = False
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        """Refuse what does not go together."""
        if self.own_lm_head and self.draft_vocab_size is not None:
            raise ValueError(
                f"draft_vocab_size={self.draft_vocab_size!r} chooses rows of the model's output embedding, which heads "
                "with own_lm_head=True do not read. Fix: leave out one of them"
            )


class ResidualBlock(nn.Module):
    """``x + SiLU(linear(x))``; a new one is the identity."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of ``[..., hidden_size]``."""
        return hidden + nn.functional.silu(self.linear(hidden))


class MedusaHeads(DraftHeads):
    """From the hidden state of token ``t``, head ``k`` (from 0) predicts ``t + 2 + k``; the model itself ``t + 1``.

    Untrained heads predict what the model does: the blocks are the identity and an output embedding of their own is a
    copy of the model's.
    """

    kind: ClassVar[str] = "medusa"
    Config: ClassVar[type[MedusaConfig]] = MedusaConfig
    config: MedusaConfig

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(config.hidden_size) for _ in range(config.num_layers)))
            for _ in range(config.num_heads)
        )
        heads = config.num_heads if config.own_lm_head else 0
        self.lm_heads = nn.ModuleList(
            nn.Linear(config.hidden_size, config.vocab_size, bias=False) for _ in range(heads)
        )

    @classmethod
    def for_model(cls, model: Any, **options: Any) -> Self:
        """Heads for a model; ``options``: ``num_heads``, ``num_layers``, ``own_lm_head``, ``draft_vocab_size``."""
        given: dict[str, Any] = {**sizes(model), **options}
        heads = cls(MedusaConfig(**given)).to(device=model.device, dtype=model.dtype)
        with torch.no_grad():
            for head in heads.lm_heads.parameters():
                head.copy_(model.get_output_embeddings().weight)
        return heads

    def forward(self, hidden_states: torch.Tensor, lm_head: Output, heads: int | None = None) -> torch.Tensor:
        """Logits of all heads, or of the first ones.

        Parameters
        ----------
        hidden_states
            ``[..., hidden_size]``.
        lm_head
            The model's output embedding, or `draft_output`; not used by heads with their own.
        heads
            How many; None for all.

        Returns
        -------
        torch.Tensor
            ``[heads, ..., vocab_size]``.
        """
        if self.config.own_lm_head:
            wanted = range(self.config.num_heads)[:heads]
            return torch.stack([self.head(index, hidden_states, lm_head) for index in wanted])
        # one product reads the output embedding once for all
        logits: torch.Tensor = lm_head(torch.stack([block(hidden_states) for block in self.blocks[:heads]]))
        return logits

    def head(self, index: int, hidden_states: torch.Tensor, lm_head: Output) -> torch.Tensor:
        """Logits of one head, ``[..., vocab_size]``."""
        output: Any = self.lm_heads[index] if self.config.own_lm_head else lm_head
        logits: torch.Tensor = output(self.blocks[index](hidden_states))
        return logits
