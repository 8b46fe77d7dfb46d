"""Drafting with a causal language model: token by token, all rows of the batch at once, from a cache of its own."""

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


class RolloutDrafter(Drafter):
    """Lets a model continue what is known.

    The model and the cache come from `draft_model` and `draft_cache`. The cache is brought up to date at the start of
    each draft: what the target rejected is cropped, what it added is given in one forward.
    """

    Options: ClassVar[type[AssistantOptions]] = RolloutOptions

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

    def propose(self, block: Block) -> Draft:
        """Continue each row; known tokens of a row that is ahead are fed."""
        self.rewind(block)
        known = torch.tensor(block.known, device=block.ids.device)
        column = block.cached + 1
        # the longest draft of a row is that of the one furthest behind
        last = block.cached + block.width
        sampled: list[torch.Tensor] = []
        while column < last:
            scores = self.call.process(block.ids[:, :column], self._feed(block, column))
            if self.call.do_sample and self.options.draft_sampling == "rejection":
                sampled.append(scores.softmax(dim=-1))
                tokens = torch.multinomial(sampled[-1], 1).squeeze(-1)
            else:
                tokens = self.call.choose(scores, column)
            block.ids[:, column] = torch.where(known > column, block.ids[:, column], tokens)
            column += 1
        lengths = [block.room(row) for row in range(len(block.known))]
        return Draft(lengths, torch.stack(sampled, dim=1) if sampled else None)

    def rewind(self, block: Block) -> None:
        """Crop the draft cache to the columns that the target agreed with."""
        if self.fed > block.cached:
            self.cache.crop(block.cached - self.fed)
            self.fed = block.cached
        elif self.fed:
            # layers that hold back until a crop (sliding windows) settle
            self.cache.crop(0)

    def _feed(self, block: Block, stop: int) -> torch.Tensor:
        """Give the model the columns up to ``stop``; the logits of the last, ``[rows, target's vocabulary]``."""
        start = self.fed
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
