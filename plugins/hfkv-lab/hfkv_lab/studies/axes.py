"""Which way to group: keys and values, each per channel or per token.

Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", 2024, table 2.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Any

import hfkv

from ..figures import MARKERS, SERIES
from ..page import Figure
from .record import Study, Subject, with_interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

WIDTHS = (2, 3, 4)
AXES = ("channel", "token")
ERRORS = ("keys", "values", "from_keys", "from_values", "output")


def run(subject: Subject) -> Study:
    """All four combinations at each width, without sinks, as KIVI is published."""
    variants, labels = {}, []
    for nbits, key_axis, value_axis in itertools.product(WIDTHS, AXES, AXES):
        label = f"{nbits} {key_axis} {value_axis}"
        options = {"nbits": nbits, "key_axis": key_axis, "value_axis": value_axis, "sink_length": 0}
        variants[label] = partial(hfkv.make_cache, "kivi", subject.model, **options)
        labels.append({"nbits": nbits, "key_axis": key_axis, "value_axis": value_axis})
    outcomes = subject.ablate(variants)
    rows = [label | outcome.columns(*ERRORS) for label, outcome in zip(labels, outcomes.values(), strict=True)]
    return Study(
        "axes",
        f"Grouping per channel or per token, {subject.name}",
        f"{subject.how} The cache is kivi with `group_size=32`, `residual_length=128` and no sinks. The errors are of "
        "single layers, each given the exact queries, keys and values; they are norms of differences over norms, "
        "averaged over the layers: of the keys, of the values, and of the attention output where only the keys, only "
        "the values, or both come from the cache.",
        findings(rows),
        {
            "nbits": "Bits", "key_axis": "Keys per", "value_axis": "Values per", "kl": "KL", "kl_low": "low",
            "kl_high": "high", "top1": "Top 1, %", "keys": "Keys", "values": "Values", "from_keys": "Output from keys",
            "from_values": "Output from values", "output": "Output",
        },
        rows,
        Figure(
            "Grouping per channel or per token", partial(_draw, rows),
            "KL over bits for the four groupings, and for values the error of reconstruction beside that of the output",
            (8.4, 3.8),
        ),
    )  # fmt: skip


def of(rows: list[dict[str, Any]], nbits: int, key_axis: str, value_axis: str) -> dict[str, Any]:
    """One combination's row."""
    wanted = {"nbits": nbits, "key_axis": key_axis, "value_axis": value_axis}
    return next(row for row in rows if wanted.items() <= row.items())


def findings(rows: list[dict[str, Any]]) -> list[str]:
    """Which combination is best at each width, and what reconstruction says of the values."""
    result = []
    for nbits in WIDTHS:
        mine = [row for row in rows if row["nbits"] == nbits]
        by_kl, by_output = (min(mine, key=lambda row, key=key: row[key]) for key in ("kl", "output"))
        best = f"keys per {by_kl['key_axis']} and values per {by_kl['value_axis']}"
        also = "and at the attention output" if by_kl is by_output else "but not at the attention output"
        result.append(f"{nbits} bits: {best} are best by KL, {also}.")
    for nbits in WIDTHS:
        channel, token = (of(rows, nbits, "channel", axis) for axis in AXES)
        result.append(
            f"Values at {nbits} bits: grouped per channel the error of reconstruction is "
            f"{channel['values'] / token['values']:.2f} times, that of the output "
            f"{channel['from_values'] / token['from_values']:.2f} times what it is per token."
        )
    return result


def _draw(rows: list[dict[str, Any]], canvas: Canvas) -> None:
    left, right = canvas.subplots(1, 2)
    combinations = list(itertools.product(AXES, AXES))
    for colour, marker, (key_axis, value_axis) in zip(SERIES, MARKERS, combinations, strict=False):
        line = [of(rows, nbits, key_axis, value_axis) for nbits in WIDTHS]
        label = f"K {key_axis}, V {value_axis}"
        with_interval(left, list(WIDTHS), line, color=colour, marker=marker, label=label)
    left.set_xticks(WIDTHS)
    left.set_xlabel("bits")
    left.set_ylabel("KL to the plain cache, nats")
    left.legend(fontsize="small")
    for place, (name, title) in enumerate((("values", "reconstruction"), ("from_values", "attention output"))):
        for number, axis in enumerate(AXES):
            x = [index + 0.2 * (2 * place + number) for index in range(len(WIDTHS))]
            heights = [of(rows, nbits, "channel", axis)[name] for nbits in WIDTHS]
            label = f"{title}, per {axis}"
            right.bar(x, heights, 0.18, color=SERIES[place], alpha=(0.45, 1.0)[number], label=label)
    right.set_xticks([index + 0.3 for index in range(len(WIDTHS))], [f"{nbits} bits" for nbits in WIDTHS])
    right.set_ylabel("relative error from values")
    right.legend(fontsize="small")
