"""Plots as inline SVG that takes its colours from the page, light or dark."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Canvas

from .page import Figure

# colours that tell eight series apart, also without red and green, on white and on near black
SERIES = ("#3b7dd8", "#e07b39", "#2a9d8f", "#b5509c", "#8a8d0f", "#d1495b", "#6c63c7", "#7a6a5a")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")

# stand-ins that no plot uses, replaced in the SVG by what the page says
_INK, _GRID = "#010203", "#040506"

_STYLE = {
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.titlecolor": _INK,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.prop_cycle": matplotlib.cycler(color=SERIES),
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "font.size": 10,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    # shapes, not text: the reader's fonts cannot push a label out of the picture
    "svg.fonttype": "path",
    # the same figure is the same bytes
    "svg.hashsalt": "hfkv",
}


@contextmanager
def style() -> Iterator[None]:
    """Draw with the page's colours."""
    with matplotlib.rc_context(_STYLE):
        yield


def svg(figure: Figure) -> str:
    """The figure as an ``<svg>`` element that scales with the page."""
    with style():
        canvas = Canvas(figsize=figure.size, layout="constrained")
        figure.draw(canvas)
        target = io.StringIO()
        FigureCanvasSVG(canvas).print_svg(target, metadata={"Date": None, "Creator": None})
    text = target.getvalue()
    text = text[text.index("<svg") :]
    # the page decides the size: the view box keeps the shape
    text = re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)
    # in a style attribute a colour may be a variable of the page
    return text.replace(_INK, "var(--ink)").replace(_GRID, "var(--grid)")


def standalone(text: str) -> str:
    """An SVG as a file of its own: with a grey that can be read on white and on near black."""
    return text.replace("var(--ink)", "#7d8590").replace("var(--grid)", "#7d859055") + "\n"
