"""What an assistant is: something that proposes tokens.

The loop (`loop.py`) keeps the rows of a batch in step: all rows hold the same number of tokens in the cache, and a row
that is ahead keeps what it knows beyond that in `Block.ids`, to be given to the model again. So nothing is masked or
moved in the cache, positions and processors are those of plain decoding, and any cache that can crop will do.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from .. import registry
from ..cache.options import check_choice, check_length, option
from .control import SCHEDULES
from .sampling import Noise
from .tree import Tree


@dataclass(frozen=True, kw_only=True)
class AssistantOptions:
    """What every assistant can be asked for; a subclass adds its own."""

    num_assistant_tokens: int | None = option(None, "tokens drafted at once, at most; None: the assistant's own")
    num_assistant_tokens_schedule: str = option(
        "measured", "measured: as many as pay, none where drafting loses; constant: always num_assistant_tokens"
    )

    # what num_assistant_tokens is where nobody says
    longest: ClassVar[int] = 8

    def __post_init__(self) -> None:
        """Check the values."""
        check_choice("num_assistant_tokens_schedule", self.num_assistant_tokens_schedule, SCHEDULES)
        if self.num_assistant_tokens is not None:
            check_length("num_assistant_tokens", self.num_assistant_tokens, minimum=1)

    @property
    def most(self) -> int:
        """Tokens drafted at once, at most."""
        return self.num_assistant_tokens or self.longest

    @classmethod
    def parse(cls, given: Mapping[str, Any], name: str) -> Self:
        """Options from the keywords of `hfkv.assistant`.

        Raises
        ------
        ValueError
            An unknown option (the message lists the valid ones and the closest) or a value that is not allowed.
        """
        fields = [field.name for field in dataclasses.fields(cls)]
        registry.check_options(given, fields, "option", f"the assistant {name!r}")
        return cls(**given)


@dataclass(frozen=True)
class Call:
    """One call of `generate`, as a drafter sees it.

    Attributes
    ----------
    model, cache
        The target and its cache, before the prompt is in it.
    do_sample
        Whether tokens are sampled.
    process
        The logits processors: ``(ids [rows, n], logits [rows, vocabulary]) -> scores``. A drafter that runs a model
        passes its logits through them, so that both sides choose alike.
    noise
        What sampling adds to the scores of a column; a drafter that adds the same chooses what the target will.
    model_kwargs
        What the target's forward is given besides the tokens: masks and positions of the prompt, encoder outputs.
    """

    model: Any
    cache: Any
    do_sample: bool
    process: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    noise: Noise
    model_kwargs: Mapping[str, Any]

    def choose(self, scores: torch.Tensor, column: int) -> torch.Tensor:
        """The tokens ``[rows]`` that these processed scores ``[rows, vocabulary]`` choose for a column."""
        return (self.noise.perturb(scores, column) if self.do_sample else scores).argmax(dim=-1)

    def candidates(self, scores: torch.Tensor, column: int, count: int) -> list[int]:
        """The likeliest tokens for a column of one row, by processed scores ``[1, vocabulary]``; `choose`'s first."""
        found: list[int] = (
            (self.noise.perturb(scores, column) if self.do_sample else scores)[0].topk(count).indices.tolist()
        )
        return found


@dataclass
class Block:
    """What is known when drafting starts.

    Attributes
    ----------
    ids
        ``[rows, columns]``: each row's known tokens, prompt first, then room for drafts.
    known
        How many tokens of each row are known; at least ``cached + 1``. A row that has finished knows more than there
        is room for.
    cached
        How many columns the target's cache holds: the same for all rows.
    width
        Columns from ``cached`` on that may be verified: a row has room for ``cached + width - known`` drafts.
    kwargs
        Masks and positions up to column ``cached``, that included.
    """

    ids: torch.Tensor
    known: list[int]
    cached: int
    width: int
    kwargs: Mapping[str, Any]

    def room(self, row: int) -> int:
        """How many tokens may be drafted for a row."""
        return max(0, self.cached + self.width - self.known[row])


@dataclass(frozen=True)
class Draft:
    """What was written into `Block.ids` after the known tokens.

    Attributes
    ----------
    lengths
        Tokens drafted for each row.
    probabilities
        ``[rows, width - 1, vocabulary]``: what the draft at column ``cached + 1 + i`` was sampled from, processors
        included. None for a draft that was not sampled, or that was chosen with `Call.choose`.
    tree
        Drafts that branch, instead of what was written; for one row, after `decoding.check_trees`.
    """

    lengths: list[int]
    probabilities: torch.Tensor | None = None
    tree: Tree | None = None


class Drafter(ABC):
    """An assistant; what an `AssistantSpec` loads. One is made for each call of `generate`.

    Parameters
    ----------
    call
        The call.
    options
        An instance of ``Options``.
    resources
        What `prepare` returned.
    """

    Options: ClassVar[type[AssistantOptions]] = AssistantOptions

    def __init__(self, call: Call, options: Any, resources: Any) -> None:
        self.call = call
        self.options = options
        self.resources = resources

    @classmethod
    def prepare(cls, model: Any, options: Any) -> Any:
        """Load or build what all calls share (weights, an index), once; check the model.

        It must not keep a reference to ``model``, whose life it would prolong.

        Raises
        ------
        ValueError, TypeError, NotImplementedError
            The assistant cannot work with this model or these options.
        """
        return None

    @property
    def most(self) -> int:
        """Tokens drafted at once, at most; a drafter that cannot draft as many as its options say narrows it."""
        most: int = self.options.most
        return most

    def forecast(self, ids: torch.Tensor, known: list[int]) -> Sequence[float] | None:
        """The probability that all of the first 1, 2, ... drafts will be accepted, by all rows that wait for them.

        For an assistant that can tell before it drafts; asked before each round. Counted from the rows with the fewest
        known tokens; fewer than ``most`` entries where no more can be drafted, none where nothing can. None: nobody can
        tell, and acceptance is learnt from drafts.
        """
        return None

    @abstractmethod
    def propose(self, block: Block) -> Draft:
        """Write drafts into ``block.ids`` after each row's known tokens, at most ``block.room(row)`` of them."""

    def keep(self, places: list[int]) -> None:
        """Of the tokens of the forward that verified a tree, those at these places stand; they are moved together."""
        return None

    def close(self) -> None:
        """The call is over, by its end or by an exception: leave the model and the cache as they were."""
        return None
