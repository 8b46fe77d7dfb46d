"""What a teacher is asked, and the form in which it is asked often."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .chunked import Teacher
from .head import OutputHead
from .layers import States, recorded
from .targets import Targets


@torch.no_grad()
def ask(
    model: Any,
    head: OutputHead,
    inputs: Mapping[str, Any],
    targets: Targets,
    wanted: Mapping[str, Sequence[int]],
) -> tuple[Teacher, States, Targets]:
    """One forward over a batch.

    Parameters
    ----------
    wanted
        Layers by kind, for `recorded`.

    Returns
    -------
    tuple
        The logits of some of the targets, made when they are asked for; states of layers; and where the targets are in
        what the teacher reads.
    """
    theirs = targets.of_teacher(inputs)
    prefix = "teacher_" if theirs is not targets else ""
    own = {name: inputs[f"{prefix}{name}"].to(model.device) for name in ("input_ids", "attention_mask")}
    seen: list[tuple[torch.Tensor, Any]] = []
    with (
        recorded(model, wanted) as states,
        head.taken(lambda hidden_states, way: seen.append((theirs.before(hidden_states), way))),
    ):
        model(**own, use_cache=False)
    hidden_states, way = seen[0]

    def say(rows: slice) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = way(hidden_states[rows]).to(targets.tokens.device)
        return logits

    return say, states, theirs


@contextmanager
def in_bfloat16(model: Any) -> Iterator[None]:
    """A frozen model's matrices in bfloat16 for as long: what autocast would make of them, once and not in each step.

    Nothing else changes, and nothing that is computed under autocast: embeddings and norms stay as they are, and a
    matrix that is tied to the embeddings stands beside them. It takes two bytes a weight.
    """
    kept = [
        (module, module.weight)
        for module in model.modules()
        if type(module) is nn.Linear and module.weight.dtype == torch.float32
    ]
    try:
        for module, weight in kept:
            module.weight = nn.Parameter(weight.detach().bfloat16(), requires_grad=False)
        yield
    finally:
        for module, weight in kept:
            module.weight = weight
