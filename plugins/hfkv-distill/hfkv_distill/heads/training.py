"""Train drafting heads on a frozen model: for a time or a number of steps, on states that are computed or stored."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hfkv.heads import DraftHeads, EagleHead, MedusaHeads

from .acceptance import Continuations, accepted_per_verification
from .losses import HeadsLoss
from .states import States

KINDS: dict[str, type[DraftHeads]] = {cls.kind: cls for cls in (MedusaHeads, EagleHead)}
# steps over which the learning rate rises
WARMUP = 20


@dataclass(frozen=True, kw_only=True)
class HeadsOptions:
    """How drafting heads are trained.

    Parameters
    ----------
    kind
        ``"medusa"`` or ``"eagle"``.
    minutes, steps
        When to end: one of them.
    batch_size
        Rows of text in a step.
    learning_rate
        Of AdamW; it rises over the first steps and falls along a cosine to the end.
    chunk_size
        Tokens whose logits exist together.
    seconds_per_log
        How often the acceptance is simulated, which takes a while.
    seed
        Of the order of the text, and of what is random in new heads.
    """

    kind: str = "medusa"
    minutes: float | None = None
    steps: int | None = None
    batch_size: int = 1
    learning_rate: float = 1e-3
    chunk_size: int = 256
    seconds_per_log: float = 60.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be trained."""
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} is not known. Choose from: {', '.join(KINDS)}")
        if (self.minutes is None) == (self.steps is None):
            raise ValueError(f"minutes={self.minutes!r} and steps={self.steps!r}: pass one of them")
        for name in ("minutes", "steps", "batch_size", "learning_rate", "chunk_size"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name}={value!r} must be more than 0")


@dataclass(frozen=True)
class Progress:
    """Where a training is.

    Attributes
    ----------
    step, tokens, seconds
        Done so far.
    share
        Of the whole, 0 to 1.
    loss
        Of the last step; nan before the first.
    accepted
        Simulated new tokens per forward of the model; None between two simulations.
    """

    step: int
    tokens: int
    seconds: float
    share: float
    loss: float
    accepted: float | None


def train_heads(
    model: Any,
    states: States,
    held_out: Continuations,
    options: HeadsOptions,
    log: Callable[[Progress], None] = lambda progress: None,
    **shape: Any,
) -> DraftHeads:
    """Heads for a model, in float32; the model is not changed.

    Parameters
    ----------
    states
        The text to learn from.
    held_out
        The model's continuations of other text, which acceptance is simulated on.
    log
        Called after each step.
    **shape
        Fields of the heads' config, e.g. ``num_heads``. The tokens of ``draft_vocab_size`` are the text's most
        frequent ones.
    """
    with torch.random.fork_rng():
        torch.manual_seed(options.seed)
        heads = KINDS[options.kind].for_model(model, **shape).float().train()
    if heads.draft_vocabulary is not None:
        heads.draft_vocabulary.copy_(frequent_tokens(states.rows, len(heads.draft_vocabulary), heads.config.vocab_size))
    loss_of = HeadsLoss(model, heads, options.chunk_size)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=options.learning_rate, weight_decay=0.0)
    begin = logged = time.monotonic()
    log(Progress(0, 0, 0.0, 0.0, math.nan, accepted_per_verification(heads, model, held_out)))
    step, tokens, share = 0, 0, 0.0
    batches = _batches(len(states.rows), options)
    while share < 1:
        ids, hidden = states(next(batches))
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * min(1, (step + 1) / WARMUP) * (1 + math.cos(math.pi * share)) / 2
        loss = loss_of(ids, hidden)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(heads.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step, tokens, now = step + 1, tokens + ids.numel(), time.monotonic()
        share = step / options.steps if options.steps else (now - begin) / (60 * (options.minutes or 0))
        accepted = None
        if share >= 1 or now - logged >= options.seconds_per_log:
            accepted, logged = accepted_per_verification(heads, model, held_out), time.monotonic()
            # a look at the heads is not training
            begin += logged - now
        log(Progress(step, tokens, now - begin, min(1.0, share), loss.item(), accepted))
    return heads.eval()


def frequent_tokens(rows: torch.Tensor, count: int, vocab_size: int) -> torch.Tensor:
    """The ``count`` most frequent tokens of a text, in order of their ids.

    Of tokens that are as frequent as each other the lower ids: a tokenizer gives them to what was frequent where it
    was trained.
    """
    seen = torch.bincount(rows.flatten(), minlength=vocab_size)
    return seen.sort(descending=True, stable=True).indices[:count].sort().values


def _batches(rows: int, options: HeadsOptions) -> Iterator[torch.Tensor]:
    """Row numbers, epoch after epoch in another order; the last batch of an epoch may be smaller."""
    generator = torch.Generator().manual_seed(options.seed)
    while True:
        yield from torch.randperm(rows, generator=generator).split(options.batch_size)
