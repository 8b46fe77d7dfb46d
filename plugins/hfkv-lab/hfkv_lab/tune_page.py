"""The tables and plots of ``hfkv tune``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .intervals import Estimate
from .page import Figure, Page, Table, interval
from .scoring import Score
from .tune import Sensitivity, sensitivity_table
from .tune_space import WIDTHS, LayerChoice, Shared

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas


@dataclass(frozen=True)
class Row:
    """A setting as checked.

    Attributes
    ----------
    bits
        Per element, at the context that is planned for; None for a cache whose layers do not say.
    bytes
        Of the tuned layers, for one user at that context.
    kl, top1
        Divergence from the plain cache, and agreement with it.
    difference
        Of its divergence to the result's, on the same tokens; None for the result.
    """

    name: str
    bits: float | None
    bytes: int | None
    kl: Estimate
    top1: Estimate
    difference: Estimate | None = None


def row(name: str, size: tuple[int, float] | None, score: Score, result: Score | None = None) -> Row:
    """A setting with its bytes and bits, its score, and the result's where it is not the result itself."""
    total, bits = size or (None, None)
    difference = None if result is None else score.minus(result)
    return Row(name, bits, total, score.interval(), score.top1, difference)


@dataclass(frozen=True)
class Tuned:
    """The result of a tuning.

    Attributes
    ----------
    cache_implementation, cache_config
        What `generate` takes.
    budget, kind, limit
        As it was written; ``"kl"`` or ``"bits"``; the limit, or None where it is the divergence of another cache.
    rows
        The result, the cache that it had to be like, then uniform settings, all on the text of the check.
    texts
        What each text was.
    resumed
        Measurements that an earlier run had made.
    """

    model: str
    cache_implementation: str
    cache_config: dict[str, Any]
    budget: str
    kind: str
    limit: float | None
    context: int
    shared: Shared
    layers: dict[int, LayerChoice]
    rows: tuple[Row, ...]
    sensitivities: tuple[Sensitivity, ...]
    texts: dict[str, str]
    resumed: int


def page(tuned: Tuned, facts: Mapping[str, str]) -> Page:
    """Everything that was found."""
    parts: list[Table | Figure] = [
        _comparison(tuned),
        _layers(tuned.layers, tuned.shared),
        _choice_figure(tuned.layers),
        _trade_figure(tuned.rows),
        _sensitivities(list(tuned.sensitivities)),
        _sensitivity_figure(list(tuned.sensitivities)),
    ]
    return Page(f"{tuned.model}: tuned for {tuned.budget}", dict(facts), parts, tuned)


def _comparison(tuned: Tuned) -> Table:
    cells = [
        (
            one.name,
            "-" if one.bits is None else f"{one.bits:.3f}",
            "-" if one.bytes is None else f"{one.bytes:,}",
            interval(one.kl, ".2g"),
            "-" if one.difference is None else interval(one.difference, "+.2g"),
            interval(one.top1, ".1%"),
        )
        for one in tuned.rows
    ]
    return Table(
        "On the text of the check",
        ("setting", "bits per element", "bytes", "KL", "KL more than tuned", "same top 1"),
        cells,
        [
            f"Bits and bytes of the tuned layers for one user at {tuned.context:,} tokens; KL and top 1 to the plain "
            "cache, while decoding a text by which nothing was chosen. In brackets: 95 % intervals, of KL by bootstrap "
            "over blocks of tokens, of top 1 by Wilson.",
            "The rows see the same tokens, so their differences are surer than each KL alone.",
            verdict(tuned),
        ],
    )


def verdict(tuned: Tuned) -> str:
    """Whether the result is within its budget on the text of the check, as far as that can tell."""
    if tuned.kind == "bits":
        return f"{tuned.rows[0].bits:.3f} bits per element: within --budget {tuned.budget}."
    if tuned.limit is None:
        excess = tuned.rows[1].difference
        low, high = (-excess.high, -excess.low) if excess else (0.0, 0.0)
        what = f"that of {tuned.rows[1].name}"
    else:
        low, high = (end - tuned.limit for end in (tuned.rows[0].kl.low, tuned.rows[0].kl.high))
        what = f"{tuned.limit:g}"
    if high <= 0:
        return f"KL is below {what} with its whole interval: --budget {tuned.budget} is kept here too."
    if low > 0:
        return f"KL is above {what} with its whole interval: --budget {tuned.budget} is not kept on this text."
    return f"The interval of KL is on both sides of {what}: whether --budget {tuned.budget} holds here is undecided."


def _layers(layers: Mapping[int, LayerChoice], shared: Shared) -> Table:
    rows = [
        (f"{index}", f"{choice.key_nbits}", f"{choice.value_nbits}", f"{choice.group_size}")
        for index, choice in sorted(layers.items())
    ]
    note = (
        f"All layers: residual_length {shared.residual_length}, sink_length {shared.sink_length}, backend "
        f"{shared.backend}."
    )
    return Table("Layer by layer", ("layer", "key bits", "value bits", "group size"), rows, [note])


def _choice_figure(layers: Mapping[int, LayerChoice]) -> Figure:
    def draw(canvas: Canvas) -> None:
        axes = canvas.subplots()
        indices = sorted(layers)
        axes.bar([index - 0.2 for index in indices], [layers[index].key_nbits for index in indices], 0.4, label="keys")
        axes.bar(
            [index + 0.2 for index in indices], [layers[index].value_nbits for index in indices], 0.4, label="values"
        )
        axes.set_xlabel("layer")
        axes.set_ylabel("bits")
        axes.set_yticks(WIDTHS)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.15), ncols=2)

    return Figure("Bits of each layer", draw, "Bits of the keys and of the values of each layer.")


def _trade_figure(rows: Sequence[Row]) -> Figure:
    def draw(canvas: Canvas) -> None:
        axes = canvas.subplots()
        tuned, *others = (one for one in rows if one.bits is not None)
        others.sort(key=lambda one: one.bits or 0.0)
        for points, style in (
            (others, {"marker": "o", "label": "one for all layers"}),
            ([tuned], {"marker": "*", "markersize": 14, "linestyle": "", "label": "tuned"}),
        ):
            kl = [one.kl for one in points]
            error = [[one.value - one.low for one in kl], [one.high - one.value for one in kl]]
            axes.errorbar([one.bits for one in points], [one.value for one in kl], yerr=error, capsize=3, **style)
        axes.set_yscale("log")
        axes.set_xlabel("bits per element")
        axes.set_ylabel("KL to the plain cache")
        axes.legend()

    return Figure(
        "Quality against size",
        draw,
        "Divergence, with its interval, over bits per element: uniform settings as a line, the result as a star.",
    )


def _sensitivities(found: list[Sensitivity]) -> Table:
    by_layer = sensitivity_table(found)
    names = list(next(iter(by_layer.values()), {}))
    rows = [(f"{layer}", *(f"{values[name]:.1e}" for name in names)) for layer, values in sorted(by_layer.items())]
    return Table(
        "What each layer costs alone",
        ("layer", *names),
        rows,
        ["KL on the text of learning, when only the keys, or only the values, of this layer have so many bits."],
    )


def _sensitivity_figure(found: list[Sensitivity]) -> Figure:
    def draw(canvas: Canvas) -> None:
        axes = canvas.subplots()
        by_layer = sensitivity_table(found)
        for name in next(iter(by_layer.values()), {}):
            style = "-" if name.startswith("key") else "--"
            axes.plot(sorted(by_layer), [by_layer[layer][name] for layer in sorted(by_layer)], style, label=name)
        axes.set_yscale("log")
        axes.set_xlabel("layer")
        axes.set_ylabel("KL")
        canvas.legend(loc="outside upper center", ncols=3)

    return Figure(
        "What each layer costs alone", draw, "Divergence by layer: keys as solid lines, values as dashed ones, by bits."
    )
