"""Drafting from logits, token by token, all rows of a batch at once: a causal language model's, or those of heads."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from .. import decoding
from ..cache.options import check_choice, option
from .drafter import AssistantOptions, Block, Call, Draft, Drafter


@dataclass(frozen=True, kw_only=True)
class RolloutOptions(AssistantOptions):
    """What every assistant that runs a model can be asked for."""

    draft_sampling: str = option(
        "coupled",
        "where generate samples: coupled drafts with the target's own noise, and the text depends on the seed alone; "
        "rejection samples the draft and accepts with min(1, p/q): more is accepted where the two models differ much",
    )

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        check_choice("draft_sampling", self.draft_sampling, ("coupled", "rejection"))


class LogitsDrafter(Drafter):
    """Chooses each draft from logits, as the target will choose from its own."""

    Options: ClassVar[type[AssistantOptions]] = RolloutOptions

    @abstractmethod
    def logits(self, block: Block, column: int) -> torch.Tensor:
        """What is drafted from at a column, ``[rows, target's vocabulary]`` in float32; asked for column by column."""

    def begin(self, block: Block) -> None:
        """A round begins."""
        return None

    def lengths(self, block: Block) -> list[int]:
        """Tokens drafted for each row: as many as there is room for."""
        return [block.room(row) for row in range(len(block.known))]

    def propose(self, block: Block) -> Draft:
        """Continue each row; known tokens of a row that is ahead stay."""
        self.begin(block)
        known = torch.tensor(block.known, device=block.ids.device)
        sampled: list[torch.Tensor] = []
        # the longest draft of a row is that of the one furthest behind
        for column in range(block.cached + 1, block.cached + block.width):
            scores = self.call.process(block.ids[:, :column], self.logits(block, column))
            if self.call.do_sample and self.options.draft_sampling == "rejection":
                sampled.append(scores.softmax(dim=-1))
                tokens = torch.multinomial(sampled[-1], 1).squeeze(-1)
            else:
                tokens = self.call.choose(scores, column)
            block.ids[:, column] = torch.where(known > column, block.ids[:, column], tokens)
        return Draft(self.lengths(block), torch.stack(sampled, dim=1) if sampled else None)


class RolloutDrafter(LogitsDrafter):
    """Lets a model continue what is known.

    The model and the cache come from `draft_model` and `draft_cache`. The cache is brought up to date at the start of
    each draft: what the target rejected is cropped, what it added is given in one forward.
    """

    def __init__(self, call: Call, options: Any, resources: Any) -> None:
        super().__init__(call, options, resources)
        self.model = self.draft_model()
        self.cache = self.draft_cache()
        self.cache_argument = decoding.cache_argument(self.model)
        # columns of `Block.ids` that the draft cache holds
        self.fed = 0

    @abstractmethod
    def draft_model(self) -> Any:
        """The model that drafts."""

    @abstractmethod
    def draft_cache(self) -> Any:
        """The cache that it drafts from."""

    def begin(self, block: Block) -> None:
        """Take back what the target rejected."""
        self.rewind(block)

    def rewind(self, block: Block) -> None:
        """Crop the draft cache to the columns that the target agreed with."""
        if self.fed > block.cached:
            self.cache.crop(block.cached - self.fed)
            self.fed = block.cached
        elif self.fed:
            # layers that hold back until a crop (sliding windows) settle
            self.cache.crop(0)

    def logits(self, block: Block, column: int) -> torch.Tensor:
        """Give the model the columns up to this one; the logits of the last."""
        start, stop = self.fed, column
        inputs: dict[str, Any] = {
            "input_ids": self.ids(block.ids[:, start:stop]),
            self.cache_argument: self.cache,
            "use_cache": True,
            "return_dict": True,
        }
        before = self.cache.get_seq_length() - start
        inputs |= decoding.positions(self.model, block.kwargs, block.cached + 1, start, stop, before)
        logits = self.model(**inputs, **decoding.last_logits(self.model)).logits[:, -1]
        self.fed = stop
        decoding.record_past(self.cache)
        return self.adapt(logits.to(device=block.ids.device, dtype=torch.float32, copy=True))

    def adapt(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits over the target's vocabulary, from those over the draft model's."""
        return logits

    def ids(self, ids: torch.Tensor) -> torch.Tensor:
        """The target's tokens as the draft model reads them."""
        return ids
