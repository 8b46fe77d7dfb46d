"""What shares a scale in a weight matrix: the whole tensor, a row, a group of 128 inputs; and nf4's own levels.

Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", 2023, for nf4.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hfkv.weights.config import backend_class

from ..attention_error import relative
from ..figures import MARKERS, SERIES
from ..page import Figure
from .record import Study, Subject

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

GRANULARITIES: dict[str, dict[str, Any]] = {
    "tensor": {"nbits": 4, "granularity": "tensor"},
    "row": {"nbits": 4, "granularity": "row"},
    "group": {"nbits": 4, "granularity": "group", "group_size": 128},
    "nf4": {"quant_type": "nf4"},
}
HEADS = {"tensor": "Per tensor", "row": "Per row", "group": "Groups of 128", "nf4": "nf4, groups of 64"}


def run(subject: Subject) -> Study:
    """The relative error of every matrix under each granularity, at 4 bits."""
    rows = matrices(subject)
    bits = ", ".join(f"{HEADS[name].lower()} {bits_per_weight(rows, name):.3f}" for name in GRANULARITIES)
    return Study(
        "granularity",
        f"What shares a scale in the weights, {subject.name}",
        f"The linear layers of {subject.name}, rounded to 4 bits by hfkv-rtn with symmetric grids. The errors are "
        f"norms of differences over norms. Bits per weight, the float16 scales included: {bits}.",
        findings(rows),
        {"matrix": "Matrix", **HEADS},
        rows,
        Figure(
            "What shares a scale in the weights", partial(_draw, rows),
            "relative error of each matrix, a point for each, by kind of matrix and by what shares a scale", (7.6, 3.8),
        ),
    )  # fmt: skip


@torch.no_grad()
def matrices(subject: Subject) -> list[dict[str, Any]]:
    """A row for each linear layer: its name, the error of each granularity, and the bytes and weights behind."""
    layer_class = backend_class("rtn", "the study granularity")
    options = {name: layer_class.Options.parse(given, "rtn") for name, given in GRANULARITIES.items()}
    linear = {name: module for name, module in subject.model.named_modules() if isinstance(module, torch.nn.Linear)}
    subject.steps.expect(len(linear))
    rows = []
    for name, module in linear.items():
        subject.steps.step("matrices")
        row: dict[str, Any] = {"matrix": name, "weights": module.weight.numel()}
        for granularity, parsed in options.items():
            quantized = layer_class.quantized(module, parsed)
            row[granularity] = relative(quantized.decode(torch.float32), module.weight)
            row[f"{granularity} bytes"] = quantized.stored_bytes
        rows.append(row)
        subject.steps.done()
    return rows


def bits_per_weight(rows: list[dict[str, Any]], granularity: str) -> float:
    """Stored bits per weight, over all matrices."""
    return 8 * sum(row[f"{granularity} bytes"] for row in rows) / sum(row["weights"] for row in rows)


def findings(rows: list[dict[str, Any]]) -> list[str]:
    """The average of each granularity, and the matrix that one scale per tensor hurts most."""
    means = {name: statistics.mean(row[name] for row in rows) for name in GRANULARITIES}
    said = ", ".join(f"{HEADS[name].lower()} {mean:.3f}" for name, mean in means.items())
    worst = max(rows, key=lambda row: row["tensor"])
    best = sum(min(GRANULARITIES, key=row.__getitem__) == "nf4" for row in rows)
    return [
        f"On average over {len(rows)} matrices: {said}.",
        f"nf4 is best for {best} of them.",
        f"One scale per tensor is worst for {worst['matrix']}: {worst['tensor']:.2f}.",
    ]


def _draw(rows: list[dict[str, Any]], canvas: Canvas) -> None:
    axes = canvas.subplots()
    kinds = list(dict.fromkeys(kind(row["matrix"]) for row in rows))
    for number, (name, colour, marker) in enumerate(zip(GRANULARITIES, SERIES, MARKERS, strict=False)):
        places = [kinds.index(kind(row["matrix"])) + 0.18 * (number - 1.5) for row in rows]
        errors = [row[name] for row in rows]
        axes.plot(places, errors, linestyle="", marker=marker, markersize=4, alpha=0.6, color=colour, label=HEADS[name])
    axes.set_xticks(range(len(kinds)), kinds, rotation=20, ha="right")
    axes.set_ylabel("relative error")
    axes.set_yscale("log")
    axes.legend(fontsize="small")


def kind(name: str) -> str:
    """A matrix without the layer's number: its last part."""
    return name.rpartition(".")[2]
