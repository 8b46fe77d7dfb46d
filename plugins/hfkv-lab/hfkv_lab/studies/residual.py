"""How many tokens to keep in full precision: the newest (the residual) and the first (the sinks)."""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Any

import hfkv

from ..ablation import SIZE_TOKENS, stored_bits
from ..figures import MARKERS, SERIES
from ..page import Figure
from .record import Study, Subject, with_interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

NBITS = 2
RESIDUALS = (0, 32, 128)
SINKS = (0, 4)


def run(subject: Subject) -> Study:
    """Every residual with and without sinks, at 2 bits, where it matters most."""
    settings = [
        {"nbits": NBITS, "residual_length": residual, "sink_length": sinks}
        for sinks, residual in itertools.product(SINKS, RESIDUALS)
    ]
    variants = {str(options): partial(hfkv.make_cache, "kivi", subject.model, **options) for options in settings}
    outcomes = subject.ablate(variants)
    rows = [
        {"sinks": options["sink_length"], "residual": options["residual_length"]}
        | outcome.columns("from_keys", "from_values", "output")
        | {"bits": stored_bits(subject.model.config, options)}
        for options, outcome in zip(settings, outcomes.values(), strict=True)
    ]
    return Study(
        "residual",
        f"Tokens kept in full precision, {subject.name}",
        f"{subject.how} The cache is kivi with `nbits={NBITS}` and `group_size=32`. The errors are of the attention "
        "output of single layers, averaged. Stored bits count everything, full-precision tokens included, at "
        f"{SIZE_TOKENS:,} tokens of a bfloat16 model.",
        findings(rows),
        {
            "sinks": "`sink_length`", "residual": "`residual_length`", "kl": "KL", "kl_low": "low", "kl_high": "high",
            "top1": "Top 1, %", "from_keys": "Output from keys", "from_values": "Output from values",
            "output": "Output", "bits": "Stored bits",
        },
        rows,
        Figure(
            "Tokens kept in full precision", partial(_draw, rows),
            "KL over the length of the residual, with and without sinks", (6.4, 3.8),
        ),
    )  # fmt: skip


def findings(rows: list[dict[str, Any]]) -> list[str]:
    """What the residual and the sinks buy."""
    at = {(row["sinks"], row["residual"]): row for row in rows}
    first, last = RESIDUALS[0], RESIDUALS[-1]
    result = [
        f"{sinks or 'No'} sinks: a residual of {last} tokens divides KL by "
        f"{at[sinks, first]['kl'] / at[sinks, last]['kl']:.2f}."
        for sinks in SINKS
    ]
    few, many = SINKS
    return [
        *result,
        f"With a residual of {last}, {many} sinks divide KL by {at[few, last]['kl'] / at[many, last]['kl']:.2f}, at "
        f"{at[many, last]['bits']:.2f} stored bits per element against {at[few, last]['bits']:.2f}.",
    ]


def _draw(rows: list[dict[str, Any]], canvas: Canvas) -> None:
    axes = canvas.subplots()
    for colour, marker, sinks in zip(SERIES, MARKERS, SINKS, strict=False):
        line = [row for row in rows if row["sinks"] == sinks]
        places = [float(row["residual"]) for row in line]
        with_interval(axes, places, line, color=colour, marker=marker, label=f"{sinks} sinks")
    axes.set_xticks(RESIDUALS)
    axes.set_xlabel("residual_length, tokens")
    axes.set_ylabel("KL to the plain cache, nats")
    axes.legend()
