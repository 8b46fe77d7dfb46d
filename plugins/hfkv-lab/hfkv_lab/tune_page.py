"""The tables and plots of ``hfkv tune``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .page import Figure, Page, Table
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
        Per element, at the context that is planned for.
    bytes
        Of the tuned layers, for one user at that context.
    """

    name: str
    bits: float
    bytes: int
    score: Score


@dataclass(frozen=True)
class Tuned:
    """The result of a tuning.

    Attributes
    ----------
    cache_implementation, cache_config
        What `generate` takes.
    rows
        The result, then uniform settings, all on the text of the check.
    """

    model: str
    cache_implementation: str
    cache_config: dict[str, Any]
    budget: str
    context: int
    shared: Shared
    layers: dict[int, LayerChoice]
    rows: tuple[Row, ...]
    sensitivities: tuple[Sensitivity, ...]


def page(tuned: Tuned, facts: Mapping[str, str]) -> Page:
    """Everything that was found."""
    parts = [
        _comparison(tuned.rows, tuned.context),
        _layers(tuned.layers, tuned.shared),
        _choice_figure(tuned.layers),
        _trade_figure(tuned.rows),
        _sensitivities(list(tuned.sensitivities)),
        _sensitivity_figure(list(tuned.sensitivities)),
    ]
    return Page(f"{tuned.model}: tuned for {tuned.budget}", dict(facts), parts, tuned)


def _comparison(rows: Sequence[Row], context: int) -> Table:
    cells = [
        (
            row.name,
            f"{row.bits:.3f}",
            f"{row.bytes:,}",
            f"{row.score.kl:.5f}",
            f"{row.score.error:.5f}",
            f"{row.score.top1:.1%}",
        )
        for row in rows
    ]
    return Table(
        "On the text of the check",
        ("setting", "bits per element", "bytes", "KL", "standard error", "same top 1"),
        cells,
        [
            f"Bits and bytes of the tuned layers for one user at {context:,} tokens; KL and top 1 to the plain cache, "
            "while decoding.",
            "The rows see the same tokens: their differences are surer than the standard error of each.",
        ],
    )


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
        tuned, *uniform = rows
        axes.plot(
            [row.bits for row in uniform], [row.score.kl for row in uniform], marker="o", label="one for all layers"
        )
        axes.plot([tuned.bits], [tuned.score.kl], marker="*", markersize=14, linestyle="", label="tuned")
        axes.set_yscale("log")
        axes.set_xlabel("bits per element")
        axes.set_ylabel("KL to the plain cache")
        axes.legend()

    return Figure(
        "Quality against size",
        draw,
        "Divergence over bits per element: uniform settings as a line, the result as a star.",
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
        axes.legend(ncols=2)

    return Figure(
        "What each layer costs alone", draw, "Divergence by layer: keys as solid lines, values as dashed ones, by bits."
    )
