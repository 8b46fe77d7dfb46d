"""Which tokens of a batch are learned, for the student and for its teacher."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .collator import IGNORED


class Targets:
    """The places of a batch that predict a target.

    Parameters
    ----------
    labels
        ``[batch, tokens]``, -100 where nothing is learned.

    Attributes
    ----------
    tokens
        The targets ``[targets]``, row after row.
    """

    def __init__(self, labels: torch.Tensor) -> None:
        following = labels[:, 1:]
        self._places = following != IGNORED
        self.tokens = following[self._places]

    def __len__(self) -> int:
        return len(self.tokens)

    def before(self, states: torch.Tensor) -> torch.Tensor:
        """What a model makes of the tokens before the targets: ``[batch, tokens, ...]`` to ``[targets, ...]``."""
        # a teacher may be on another device
        return states[:, :-1][self._places.to(states.device)]

    def at(self, values: torch.Tensor) -> torch.Tensor:
        """What is stored with the targets: ``[batch, tokens, ...]`` to ``[targets, ...]``."""
        return values[:, 1:][self._places]

    def of_teacher(self, inputs: Mapping[str, torch.Tensor]) -> Targets:
        """The same targets in the teacher's inputs: these, where it reads what the student reads.

        Raises
        ------
        ValueError
            Its targets are other tokens.
        """
        if "teacher_input_ids" not in inputs:
            return self
        theirs = Targets(inputs["teacher_labels"])
        if not torch.equal(theirs._places.sum(dim=1), self._places.sum(dim=1)) or not torch.equal(
            theirs.tokens, self.tokens
        ):
            raise ValueError(
                "teacher_labels and labels have different targets: the response that is learned must be the same "
                "tokens after both prompts"
            )
        return theirs
