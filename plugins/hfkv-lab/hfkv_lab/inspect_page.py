"""How the result of ``hfkv inspect`` is shown."""

from __future__ import annotations

import statistics
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from .advice import Advice, advise
from .geometry import NBITS
from .inspection import CHANNEL_OUTLIER, DIMENSION_OUTLIER, FEW, SIGMAS, SINKS, Inspection
from .page import Figure, Page, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

# rows of the tables of single dimensions and matrices
SHOWN = 8


def page(found: Inspection, made_with: dict[str, str]) -> Page:
    """The advice first, then what it comes from."""
    facts = made_with | {"read": f"{found.tokens:,} tokens; attention of the last {found.queries}"}
    advice = advise(found)
    heat = "a row for each layer, a column for each channel; bright ones are large for their layer"
    parts: list[Table | Figure] = [
        _advice(advice),
        Figure("Magnitude of the keys by channel", partial(_heat, found, "keys"), f"keys: {heat}", (7.0, 3.4)),
        Figure("Magnitude of the values by channel", partial(_heat, found, "values"), f"values: {heat}", (7.0, 3.4)),
        _layers(found),
        Figure("Where attention looks", partial(_attention, found), "shares of attention over the layers"),
        _geometry(found),
        _residual(found),
        _matrices(found),
    ]
    return Page("What the tensors look like", facts, parts, {"made_with": facts, "advice": advice, "inspection": found})


def _advice(advice: list[Advice]) -> Table:
    rows = [[item.option, item.answer, item.because] for item in advice]
    note = (
        "The errors are of single layers, each given the exact rest. Errors add up over layers and tokens: hfkv eval "
        "measures what a choice costs in the end."
    )
    return Table("What they ask for", ("option", "answer", "because"), rows, [note])


def _layers(found: Inspection) -> Table:
    rows = []
    for layer in found.layers:
        steady = layer.keys.steadiness
        rows.append(
            [
                str(layer.layer),
                str(len(layer.keys.outliers)),
                f"{layer.keys.largest:.1f}x",
                "-" if steady is None else f"{steady:.0%}",
                str(len(layer.values.outliers)),
                f"{layer.values.largest:.1f}x",
                f"{layer.attention.sinks:.0%}",
                f"{layer.attention.few:.0%}",
                f"{layer.attention.ninety:.0f}",
            ]
        )
    notes = [
        f"K out, V out: channels above {CHANNEL_OUTLIER:g} times the median channel of the layer; top: the largest. "
        "Steady: the share of tokens in which those are above twice the median.",
        f"Sinks: attention on the first {SINKS} tokens; few: on the strongest {FEW:.0%} of the tokens; 90 %: tokens "
        "that hold that much.",
    ]
    header = ("layer", "K out", "K top", "steady", "V out", "V top", "sinks", "few", "90 %")
    return Table("Layer by layer", header, rows, notes)


def _geometry(found: Inspection) -> Table:
    rows = [
        [
            trial.part,
            trial.axis,
            str(trial.sinks),
            "yes" if trial.rotated else "no",
            f"{trial.reconstruction:.3f}",
            f"{trial.output:.3f}",
        ]
        for trial in found.geometry
    ]
    notes = [f"Relative errors at {NBITS} bits, averaged over the layers, with the other of keys and values exact."]
    return Table("Geometries", ("part", "per", "sinks", "rotated", "reconstruction", "output"), rows, notes)


def _residual(found: Inspection) -> Table:
    counts = Counter(dimension for block in found.residual for dimension in block.outliers)
    strongest = max(found.residual, key=lambda block: block.largest)
    rows = [[str(dimension), f"{count} of {len(found.residual)}"] for dimension, count in counts.most_common(SHOWN)]
    notes = [
        f"{len(counts)} dimensions are above {DIMENSION_OUTLIER:g} times the median dimension after some block, the "
        "first token left out; the most frequent are shown.",
        f"The largest activation is {strongest.largest:,.0f} times the median one: after block {strongest.block}, at "
        f"token {strongest.token}, dimension {strongest.dimension}.",
    ]
    return Table("Outlier dimensions of the residual stream", ("dimension", "after blocks"), rows, notes)


def _matrices(found: Inspection) -> Table:
    worst = sorted(found.matrices, key=lambda matrix: matrix.beyond / matrix.weights, reverse=True)[:SHOWN]
    rows = [[matrix.name, f"{matrix.weights:,}", f"{matrix.beyond:,}", f"{matrix.largest:.1f}"] for matrix in worst]
    share = statistics.mean(bool(matrix.beyond) for matrix in found.matrices)
    notes = [
        f"Weights farther than {SIGMAS:g} standard deviations from the mean of their matrix; {share:.0%} of the "
        f"{len(found.matrices)} matrices have some. Of normal ones, two in a billion would."
    ]
    return Table(f"Weights beyond {SIGMAS:g} sigma", ("matrix", "weights", "beyond", "farthest"), rows, notes)


def _heat(found: Inspection, part: str, canvas: Canvas) -> None:
    import numpy

    axes = canvas.subplots()
    rows = []
    for layer in found.layers:
        magnitude = numpy.array(getattr(layer, part).magnitude)
        rows.append(numpy.log2(magnitude / numpy.median(magnitude)))
    width = max(len(row) for row in rows)
    picture = numpy.full((len(rows), width), numpy.nan)
    for row, values in zip(picture, rows, strict=True):
        row[: len(values)] = values
    image = axes.imshow(picture, aspect="auto", cmap="viridis", vmin=-3, vmax=4, interpolation="nearest")
    axes.grid(visible=False)
    axes.set_xlabel("channel, the heads one after another")
    axes.set_ylabel("layer")
    ticks = range(0, len(rows), max(1, len(rows) // 8))
    axes.set_yticks(ticks, [str(found.layers[index].layer) for index in ticks])
    bar = canvas.colorbar(image, ax=axes)
    bar.set_ticks([-2, 0, 2, 4], labels=["1/4", "1", "4", "16"])
    bar.set_label("times the layer's median channel")


def _attention(found: Inspection, canvas: Canvas) -> None:
    axes: Any = canvas.subplots()
    places = [layer.layer for layer in found.layers]
    axes.plot(places, [layer.attention.sinks for layer in found.layers], marker=".", label=f"first {SINKS} tokens")
    axes.plot(places, [layer.attention.few for layer in found.layers], marker=".", label=f"strongest {FEW:.0%}")
    axes.set_ylim(0, 1)
    axes.set_xlabel("layer")
    axes.set_ylabel("share of attention")
    axes.legend(fontsize="small")
