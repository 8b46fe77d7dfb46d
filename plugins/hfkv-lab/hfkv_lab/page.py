"""What every command of the laboratory says: tables and figures in order, for the terminal and for the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

    from .intervals import Estimate


@dataclass(frozen=True)
class Table:
    """A table whose cells are ready to be shown.

    Attributes
    ----------
    header
        One text a column.
    rows
        Texts; one that reads as a number is aligned to the right.
    notes
        What the columns mean, and how sure the numbers are.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Figure:
    """A plot that is drawn only for a report.

    Attributes
    ----------
    draw
        Called with an empty matplotlib figure; colours come from `figures.SERIES` and the defaults.
    description
        What the plot shows, in words: it stands for the plot where that cannot be seen.
    size
        Inches; at this width the labels can be read on a phone.
    """

    title: str
    draw: Callable[[Canvas], None]
    description: str
    size: tuple[float, float] = (5.2, 3.3)
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Page:
    """Everything that a command found.

    Attributes
    ----------
    facts
        What was run, on what: one line each.
    parts
        Tables and figures, in the order in which they are read.
    data
        The result behind them: a dataclass, a dict or a list; what ``--json`` prints.
    """

    title: str
    facts: dict[str, str]
    parts: Sequence[Table | Figure]
    data: Any


def interval(estimate: Estimate | None, form: str) -> str:
    """A cell: a number with its interval, or a dash."""
    if estimate is None:
        return "-"
    return f"{estimate.value:{form}} ({estimate.low:{form}} to {estimate.high:{form}})"
