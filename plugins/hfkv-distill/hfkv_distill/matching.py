"""Matching what layers compute: hidden states, attention outputs, keys and values.

*FitNets: Hints for Thin Deep Nets* (Romero et al., 2015), token by token, as mean squares over the width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .layers import KINDS, States, decoder_layers, recorded
from .targets import Targets

# what a kind is recorded as
_NAMES = {"hidden": ("hidden",), "attention": ("attention",), "kv": ("key", "value")}


class Matching(nn.Module):
    """The squared distance between states of paired layers.

    Where their widths differ, a linear projection of the student's states is learned with it.

    Parameters
    ----------
    student, teacher
        The models.
    weights
        What each kind counts: ``"hidden"``, ``"attention"``, ``"kv"``; 0 leaves it out.
    pairs
        The teacher's layer for each of the student's; by default spread evenly.
    """

    def __init__(
        self, student: Any, teacher: Any, weights: Mapping[str, float], pairs: Mapping[int, int] | None = None
    ) -> None:
        super().__init__()
        self.weights = {kind: weight for kind, weight in weights.items() if weight}
        if pairs is None:
            pairs = evenly(len(decoder_layers(student)), len(decoder_layers(teacher)))
        self.pairs = {int(ours): int(theirs) for ours, theirs in pairs.items()}
        self.projections = nn.ModuleDict()
        for (name, index), (ours, theirs) in self._widths(student, teacher).items():
            if ours != theirs:
                parameter = next(student.parameters())
                self.projections[f"{name}_{index}"] = nn.Linear(
                    ours, theirs, bias=False, device=parameter.device, dtype=parameter.dtype
                )

    def wanted(self, side: str) -> dict[str, list[int]]:
        """The layers to record: of the ``"student"``, or of the ``"teacher"``."""
        layers = list(self.pairs) if side == "student" else sorted(set(self.pairs.values()))
        return {kind: layers for kind in self.weights}

    @torch.no_grad()
    def _widths(self, student: Any, teacher: Any) -> dict[tuple[str, int], tuple[int, int]]:
        """The widths of both sides, asked of a forward of one token."""
        found = []
        for side, model in (("student", student), ("teacher", teacher)):
            training = model.training
            model.eval()
            try:
                with recorded(model, self.wanted(side)) as states:
                    model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=model.device), use_cache=False)
            finally:
                model.train(training)
            found.append({key: value.shape[-1] for key, value in states.items()})
        ours, theirs = found
        return {(name, index): (width, theirs[name, self.pairs[index]]) for (name, index), width in ours.items()}

    def forward(self, ours: States, theirs: States, targets: Targets, of_teacher: Targets) -> torch.Tensor:
        """The weighted distance, summed over the targets and averaged over the pairs."""
        total = torch.zeros((), device=targets.tokens.device)
        for kind, weight in self.weights.items():
            names = _NAMES[kind]
            for name in names:
                for index, other in self.pairs.items():
                    states = ours[name, index]
                    if f"{name}_{index}" in self.projections:
                        states = self.projections[f"{name}_{index}"](states)
                    aim = of_teacher.before(theirs[name, other]).to(states.device)
                    distance = (targets.before(states).float() - aim.float()).square().mean(dim=-1).sum()
                    total = total + weight * distance / (len(names) * len(self.pairs))
        return total


def evenly(students: int, teachers: int) -> dict[int, int]:
    """Pairs of layers, spread evenly: the last with the last."""
    return {index: max(0, (index + 1) * teachers // students - 1) for index in range(students)}


def check_weights(weights: Mapping[str, float]) -> None:
    """Raise ValueError for a negative one."""
    for kind in KINDS:
        if weights[kind] < 0:
            raise ValueError(f"{kind}_weight={weights[kind]!r} must be at least 0, which leaves it out")
