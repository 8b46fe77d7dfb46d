"""Keys quantized before or after the rotary embedding.

Hooper et al., "KVQuant: Towards 10 Million Context Length LLM Inference with KV Cache Quantization", 2024, section 3.2.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Any

from hfkv import registry
from hfkv.cache import PackedFormat
from hfkv.specs import KVQuantizerSpec

from .. import text
from ..ablation import attention_shape
from ..attention_error import QUERIES
from ..figures import MARKERS, SERIES
from ..page import Figure
from ..rotary import make_cache, rotations
from .record import Study, Subject, with_interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

WIDTHS = (2, 3, 4)
AXES = ("channel", "token")
ORDERS = ("after", "before")
GROUP_SIZE = 32
RESIDUAL = 128


def run(subject: Subject) -> Study:
    """Keys only, per channel and per token, before and after the embedding, at each width."""
    length = subject.options.prefill + max(subject.options.tokens, QUERIES)
    ids = text.encode(subject.tokenizer, subject.content)
    (window,) = text.windows(ids, 1, length, text.start(subject.tokenizer))
    turned = rotations(subject.model, window)
    quantizer = registry.find(KVQuantizerSpec, "rtn", "backend")()
    _, head_dim = attention_shape(subject.model.config)
    variants, labels = {}, []
    for nbits, axis, order in itertools.product(WIDTHS, AXES, ORDERS):
        format = PackedFormat(nbits, axis, GROUP_SIZE, head_dim)
        rotation = turned if order == "before" else None
        variants[f"{nbits} {axis} {order}"] = partial(make_cache, subject.model, quantizer, format, RESIDUAL, rotation)
        labels.append({"nbits": nbits, "axis": axis, "order": order})
    outcomes = subject.ablate(variants)
    rows = [
        label | outcome.columns("keys", "from_keys") for label, outcome in zip(labels, outcomes.values(), strict=True)
    ]
    return Study(
        "rope",
        f"Keys quantized before and after the rotary embedding, {subject.name}",
        f"{subject.how} Only keys are quantized, in groups of {GROUP_SIZE} with the quantizer rtn; the newest "
        f"{RESIDUAL} tokens are exact, and there are no sinks. Before the embedding: what is quantized is "
        "turned back first, and turned again after. The errors are of single layers, averaged: of the keys as "
        "attention sees them, and of the attention output.",
        findings(rows),
        {
            "nbits": "Bits", "axis": "Keys per", "order": "Embedding", "kl": "KL", "kl_low": "low",
            "kl_high": "high", "top1": "Top 1, %", "keys": "Keys", "from_keys": "Output",
        },
        rows,
        Figure(
            "Keys before and after the rotary embedding", partial(_draw, rows),
            "KL over bits, keys per channel and per token, quantized before and after the rotary embedding", (6.4, 3.8),
        ),
    )  # fmt: skip


def findings(rows: list[dict[str, Any]]) -> list[str]:
    """What quantizing before the embedding does to each axis."""
    at = {(row["nbits"], row["axis"], row["order"]): row for row in rows}
    return [
        f"{nbits} bits, keys per {axis}: quantized before the embedding, KL is "
        f"{at[nbits, axis, 'before']['kl'] / at[nbits, axis, 'after']['kl']:.2f} times what it is after, the error of "
        f"the output {at[nbits, axis, 'before']['from_keys'] / at[nbits, axis, 'after']['from_keys']:.2f} times."
        for nbits, axis in itertools.product(WIDTHS, AXES)
    ]


def _draw(rows: list[dict[str, Any]], canvas: Canvas) -> None:
    axes = canvas.subplots()
    for (colour, marker, axis), (style, order) in itertools.product(
        zip(SERIES, MARKERS, AXES, strict=False), zip(("-", "--"), ORDERS, strict=True)
    ):
        line = [row for row in rows if (row["axis"], row["order"]) == (axis, order)]
        label = f"per {axis}, {order}"
        with_interval(axes, list(WIDTHS), line, color=colour, marker=marker, linestyle=style, label=label)
    axes.set_xticks(WIDTHS)
    axes.set_xlabel("bits of the keys")
    axes.set_ylabel("KL to the plain cache, nats")
    axes.legend(fontsize="small")
