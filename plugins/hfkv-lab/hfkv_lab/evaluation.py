"""What an evaluation is asked for, and what it finds."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from . import needles
from .attention_error import LayerError
from .intervals import Estimate
from .parts import PARTS


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """How much is measured.

    Attributes
    ----------
    parts
        Which of `PARTS`.
    windows
        Pieces of the text to decode.
    prefill
        Tokens of each piece that are read at once, before anything is measured.
    tokens
        Tokens of each piece that are decoded and compared.
    chunk
        Tokens of each forward while decoding.
    new_tokens
        Tokens of free greedy decoding after each prefill.
    context
        Tokens of text before each fact and each prompt.
    needle_lengths, needle_depths
        Haystacks, in tokens, and where the needle lies in each.
    seed
        Of the needles and of the bootstrap.
    """

    parts: tuple[str, ...] = tuple(PARTS)
    windows: int = 3
    prefill: int = 1024
    tokens: int = 512
    chunk: int = 16
    new_tokens: int = 48
    context: int = 512
    needle_lengths: tuple[int, ...] = needles.LENGTHS
    needle_depths: tuple[float, ...] = needles.DEPTHS
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the values."""
        unknown = [part for part in self.parts if part not in PARTS]
        if unknown or not self.parts:
            raise ValueError(f"parts={unknown or list(self.parts)} is not supported. Choose from: {', '.join(PARTS)}")
        for name in ("windows", "prefill", "tokens", "chunk", "new_tokens", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("needle_lengths", "needle_depths"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty: name at least one")
        if not all(0 <= depth <= 1 for depth in self.needle_depths):
            raise ValueError(f"needle_depths={self.needle_depths} must lie between 0 and 1")


@dataclass
class Evaluation:
    """What was found for one candidate; None for what was not measured.

    Attributes
    ----------
    label
        The candidate's.
    bits_per_element
        Bits that the cache stores for each key and value, everything counted, after a window.
    bits_per_weight
        Bits that a quantized weight takes, scales included; None for a model that is not quantized by hfkv.
    perplexity, kl, top1
        Of the decoded tokens; divergence and agreement are to the reference.
    perplexity_ratio
        Of its perplexity to the reference's, from the same tokens: surer than either.
    prefixes
        For each window, how many freely decoded tokens are those of the reference, up to the first that is not.
    layers
        The error of each layer.
    needles
        For each needle, whether it was found.
    facts
        Share of right answers.
    flips
        Share of prompts that are refused here and answered by the reference, or the other way round.
    """

    label: str
    bits_per_element: float | None = None
    bits_per_weight: float | None = None
    perplexity: Estimate | None = None
    perplexity_ratio: Estimate | None = None
    kl: Estimate | None = None
    top1: Estimate | None = None
    prefixes: list[int] | None = None
    layers: list[LayerError] | None = None
    needles: list[bool] | None = None
    facts: Estimate | None = None
    flips: Estimate | None = None

    @property
    def prefix(self) -> float | None:
        """The median of ``prefixes``."""
        return None if self.prefixes is None else statistics.median(self.prefixes)
