"""How many elements share a scale and an offset: small groups are exact and cost bits, 32 for each group."""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Any

import hfkv
from hfkv.cache import PackedFormat

from ..ablation import SIZE_TOKENS, attention_shape, stored_bits
from ..figures import MARKERS, SERIES
from ..page import Figure
from .record import Study, Subject, with_interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

WIDTHS = (2, 4)
GROUPS = (16, 32, 64, 128)


def run(subject: Subject) -> Study:
    """Every group size at each width, with kivi's other defaults."""
    settings = [{"nbits": nbits, "group_size": size} for nbits, size in itertools.product(WIDTHS, GROUPS)]
    variants = {str(options): partial(hfkv.make_cache, "kivi", subject.model, **options) for options in settings}
    outcomes = subject.ablate(variants)
    _, head_dim = attention_shape(subject.model.config)
    rows = [
        {"nbits": options["nbits"], "group": options["group_size"]}
        | outcome.columns("from_keys", "from_values", "output")
        | {"packed": packed_bits(head_dim, **options), "bits": stored_bits(subject.model.config, options)}
        for options, outcome in zip(settings, outcomes.values(), strict=True)
    ]
    return Study(
        "group",
        f"Group size, {subject.name}",
        f"{subject.how} The cache is kivi with its defaults, 4 sinks and a residual of 128. Keys are grouped over "
        f"tokens, values over channels, of which a head has {head_dim}: a larger group of values is cut to that. The "
        "errors are of the attention output of single layers, averaged. Packed bits are of the packed tokens alone: "
        f"codes, scales and offsets; stored bits count everything at {SIZE_TOKENS:,} tokens of a bfloat16 model.",
        findings(rows),
        {
            "nbits": "Bits", "group": "`group_size`", "kl": "KL", "kl_low": "low", "kl_high": "high",
            "top1": "Top 1, %", "from_keys": "Output from keys", "from_values": "Output from values",
            "output": "Output", "packed": "Packed bits", "bits": "Stored bits",
        },
        rows,
        Figure(
            "Group size", partial(_draw, rows), "KL over the packed bits per element, a line for each width", (6.4, 3.8)
        ),
    )  # fmt: skip


def packed_bits(head_dim: int, nbits: int, group_size: int) -> float:
    """Bits per element of a packed block, keys per channel and values per token."""
    formats = [PackedFormat(nbits, axis, group_size, head_dim) for axis in ("channel", "token")]
    elements = 2 * group_size * head_dim
    return 8 * sum(format.block_bytes for format in formats) / elements


def findings(rows: list[dict[str, Any]]) -> list[str]:
    """What the smallest group buys, and whether it beats the next width."""
    result = []
    for nbits in WIDTHS:
        line = [row for row in rows if row["nbits"] == nbits]
        small, large = line[0], line[-1]
        result.append(
            f"{nbits} bits: groups of {small['group']} divide the KL of groups of {large['group']} by "
            f"{large['kl'] / small['kl']:.2f} for {small['packed'] - large['packed']:.2f} packed bits more."
        )
    return result


def _draw(rows: list[dict[str, Any]], canvas: Canvas) -> None:
    axes = canvas.subplots()
    for colour, marker, nbits in zip(SERIES, MARKERS, WIDTHS, strict=False):
        line = [row for row in rows if row["nbits"] == nbits]
        places = [row["packed"] for row in line]
        with_interval(axes, places, line, color=colour, marker=marker, label=f"{nbits} bits")
        for place, row in zip(places, line, strict=True):
            axes.annotate(str(row["group"]), (place, row["kl"]), (4, 4), textcoords="offset points", fontsize="small")
    axes.set_xlabel("packed bits per element (beside each point: group_size)")
    axes.set_ylabel("KL to the plain cache, nats")
    axes.legend()
