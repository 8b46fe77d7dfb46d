"""How the result of ``hfkv eval`` is shown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from . import facts, refusals
from .evaluate import EvalOptions, Evaluation
from .intervals import Estimate, share
from .page import Figure, Page, Table, interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas


def page(results: Sequence[Evaluation], options: EvalOptions, made_with: dict[str, str]) -> Page:
    """The tables and figures of what was measured; the first result is the reference's."""
    parts: list[Table | Figure] = []
    if "decoding" in options.parts or "prefix" in options.parts:
        parts.append(_decoding(results, options))
    if "decoding" in options.parts and len(results) > 1:
        text = "KL to the reference with its 95 % interval, a bar for each cache"
        parts.append(
            Figure("KL to the reference", partial(_draw_kl, results[1:]), text, (7.0, 0.8 + 0.5 * len(results)))
        )
    if {"needles", "facts", "refusals"} & set(options.parts):
        parts.append(_answers(results, options))
    if "needles" in options.parts:
        parts.append(_needles(results, options))
    if "layers" in options.parts:
        parts.append(_layers(results))
        if any(result.layers for result in results[1:]):
            text = "relative error of the attention output over the layers, a line for each cache"
            parts.append(Figure("Error of the attention output", partial(_draw_layers, results[1:]), text))
    return Page("What caches cost in quality", made_with, parts, data(results, options, made_with))


def data(results: Sequence[Evaluation], options: EvalOptions, made_with: dict[str, str]) -> dict[str, Any]:
    """The result as ``--json`` prints it."""
    return {"made_with": made_with, "options": options, "caches": results}


def _small(estimate: Estimate | None) -> str:
    """A divergence, with the digits that its size allows."""
    if estimate is None:
        return "-"
    # the plain cache against itself: no digits of rounding errors
    return "0" if estimate.high < 1e-9 else interval(estimate, ".2g")


def _more(ratio: Estimate | None) -> str:
    """A ratio as what it has more than one."""
    if ratio is None:
        return "-"
    value, low, high = (end - 1 for end in (ratio.value, ratio.low, ratio.high))
    return "0" if max(-low, high) < 1e-6 else f"{value:+.1%} ({low:+.1%} to {high:+.1%})"


def _decoding(results: Sequence[Evaluation], options: EvalOptions) -> Table:
    rows = [
        [
            result.label,
            interval(result.perplexity, ".2f"),
            _more(result.perplexity_ratio),
            _small(result.kl),
            interval(result.top1, ".1%"),
            _prefix(result),
            "-" if result.bits_per_element is None else f"{result.bits_per_element:.2f}",
        ]
        for result in results
    ]
    header = ["cache", "perplexity", "against the first", "KL", "top 1", "same prefix", "bits per element"]
    if any(result.bits_per_weight for result in results):
        header.append("bits per weight")
        for row, result in zip(rows, results, strict=True):
            row.append("-" if result.bits_per_weight is None else f"{result.bits_per_weight:.2f}")
    count = options.windows * options.tokens
    pieces = "One piece" if options.windows == 1 else f"{options.windows} pieces"
    notes = [
        f"{pieces} of the text: {options.prefill:,} tokens read at once, then {options.tokens:,} given in chunks of "
        f"{options.chunk} ({count:,} predictions). In brackets: 95 % intervals, of perplexity and KL by "
        "bootstrap over blocks of neighbouring tokens, of top 1 by Wilson with the number of independent tokens.",
        "Against the first: perplexity in those of the first row, minus one; on the same tokens, so it is surer than "
        "perplexity, whose interval is mostly that of the text.",
        "KL: divergence from the first row's predictions, in nats. Top 1: how often the most likely token is the same.",
        "bits per element: of everything the cache holds after a piece, the tokens in full precision included.",
    ]
    if "prefix" in options.parts:
        notes.append(
            f"Same prefix: of {options.new_tokens} tokens written freely after each prefill, those before the first "
            "that differs; the median, and the shortest and longest. One close call ends it: it says that outputs "
            "differ, not that they are worse."
        )
    return Table("While decoding", header, rows, notes)


def _prefix(result: Evaluation) -> str:
    if result.prefixes is None:
        return "-"
    return f"{statistics.median(result.prefixes):g} ({min(result.prefixes)} to {max(result.prefixes)})"


def _answers(results: Sequence[Evaluation], options: EvalOptions) -> Table:
    rows = []
    for result in results:
        rows.append(
            [result.label, _found(result.needles), interval(result.facts, ".0%"), interval(result.flips, ".0%")]
        )
    notes = []
    if "facts" in options.parts:
        notes.append(
            f"Facts: the right one of four endings, {len(facts.FACTS)} times, after {options.context} tokens of text. "
            "So few questions separate little: two caches are different only where the intervals do not overlap."
        )
    if "refusals" in options.parts:
        notes.append(
            f"Flips: of {len(refusals.PROMPTS)} harmless prompts, those that are refused where the first row answers, "
            "or the other way round."
        )
    return Table("Answers from the cache", ("cache", "needles found", "facts", "flips"), rows, notes)


def _found(needles: Sequence[bool] | None) -> str:
    if needles is None:
        return "-"
    found = share(sum(needles), len(needles))
    return f"{sum(needles)} of {len(needles)} ({found.low:.0%} to {found.high:.0%})"


def _needles(results: Sequence[Evaluation], options: EvalOptions) -> Table:
    rows = []
    for result in results:
        found = iter(result.needles or ())
        for length in options.needle_lengths:
            rows.append([result.label, f"{length:,}", *("yes" if next(found) else "no" for _ in options.needle_depths)])
    header = ("cache", "tokens", *(f"at {depth:.0%}" for depth in options.needle_depths))
    note = "A number is hidden at this depth of a text of so many tokens, and asked for at its end."
    return Table("Needles", header, rows, [note])


_ERRORS = ("keys", "values", "from_keys", "from_values", "output")


def _layers(results: Sequence[Evaluation]) -> Table:
    rows = []
    for result in results:
        layers = result.layers or []
        means = [
            f"{statistics.mean(getattr(layer, name) for layer in layers):.2g}" if layers else "-" for name in _ERRORS
        ]
        worst = max(layers, key=lambda layer: layer.output, default=None)
        rows.append(
            [result.label, *means, "-" if worst is None or worst.output == 0 else f"{worst.layer} ({worst.output:.2g})"]
        )
    notes = [
        "Relative errors, averaged over the layers; each layer is given the exact queries, keys and values. Output: of "
        "what attention makes of them, where only the keys, only the values, or both come from the cache.",
        "The error of reconstruction is a poor guide: what counts is where attention looks.",
    ]
    if any(not result.layers for result in results):
        notes.append("-: the cache leaves tokens out, so there is nothing to compare one by one.")
    header = ("cache", "keys", "values", "output, keys", "output, values", "output", "worst layer")
    return Table("Layer by layer", header, rows, notes)


def _draw_kl(results: Sequence[Evaluation], canvas: Canvas) -> None:
    axes = canvas.subplots()
    for place, result in enumerate(results):
        if result.kl is not None:
            error = [[result.kl.value - result.kl.low], [result.kl.high - result.kl.value]]
            axes.errorbar(max(result.kl.value, 1e-9), place, xerr=error, marker="o", capsize=3)
    axes.set_yticks(range(len(results)), [result.label for result in results])
    axes.set_ylim(len(results) - 0.5, -0.5)
    axes.set_xscale("log")
    axes.set_xlabel("nats")


def _draw_layers(results: Sequence[Evaluation], canvas: Canvas) -> None:
    axes = canvas.subplots()
    for result in results:
        layers = [layer for layer in result.layers or () if layer.output > 0]
        axes.plot([layer.layer for layer in layers], [layer.output for layer in layers], marker=".", label=result.label)
    axes.set_yscale("log")
    axes.set_xlabel("layer")
    axes.set_ylabel("relative error")
    axes.legend(fontsize="small")
