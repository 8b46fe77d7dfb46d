"""What a study found: a table and a figure, on the terminal, in a report, and as the files of ``docs/studies/``."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from ..ablation import AblationOptions, Outcome, ablate
from ..page import Figure, Page, Table
from ..progress import Silent, Watcher

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INTERVAL = ("kl_low", "kl_high")


@dataclass(frozen=True)
class Subject:
    """What a study is made on.

    Attributes
    ----------
    name
        The model's name, for titles.
    content
        The text.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    content: str
    options: AblationOptions = field(default_factory=AblationOptions)
    steps: Watcher = field(default_factory=Silent)

    def ablate(self, variants: Mapping[str, Callable[[], Cache]]) -> dict[str, Outcome]:
        """Measure the variants with the study's options."""
        return ablate(self.model, self.tokenizer, self.content, variants, self.options, self.steps)

    @property
    def how(self) -> str:
        """How divergence and agreement were measured."""
        options = self.options
        pieces = "one piece" if options.windows == 1 else f"{options.windows} pieces"
        return (
            f"{self.name} in {str(self.model.dtype).removeprefix('torch.')}: from {pieces} of the text "
            f"{options.prefill:,} tokens are read at once, then {options.tokens:,} are given in chunks of "
            f"{options.chunk}. KL and top 1 compare what is predicted then with the plain cache's predictions, in nats "
            "and in per cent; low and high are the 95 % interval of KL."
        )


@dataclass(frozen=True)
class Study:
    """A table and a figure.

    Attributes
    ----------
    name
        The study's, as on the command line.
    title
        What it shows, and on which model.
    about
        What was run and what the columns mean.
    findings
        What the numbers say, a sentence each, made from the numbers.
    columns
        Keys of a row, in order, with their heads.
    rows
        The numbers.
    figure
        The plot of them.
    """

    name: str
    title: str
    about: str
    findings: list[str]
    columns: dict[str, str]
    rows: list[dict[str, Any]]
    figure: Figure

    def page(self, facts: dict[str, str]) -> Page:
        """The study for the terminal and the report."""
        # on a terminal a number and its interval are one column
        keys = [key for key in self.columns if key not in INTERVAL]
        header = [self.columns[key].replace("`", "") for key in keys]
        rows = [[_with_interval(row) if key == "kl" else shown(row[key]) for key in keys] for row in self.rows]
        notes = [*self.findings, self.about.replace("`", "")]
        data = {"title": self.title, "findings": self.findings, "columns": self.columns, "rows": self.rows}
        return Page(
            self.title,
            facts,
            [Table(f"Study: {self.name}", header, rows, notes), self.figure],
            {"facts": facts, **data},
        )

    def save(self, folder: Path, stem: str, command: str) -> list[Path]:
        """Write the numbers and the plot as ``STEM.json`` and ``STEM.svg``; return the two paths."""
        from ..figures import standalone, svg

        record = {
            "title": self.title,
            "plugins": [],
            "about": "\n\n".join([self.about, " ".join(self.findings)]),
            "command": command,
            "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers")},
            "figure": {"file": f"{stem}.svg", "description": self.figure.description},
            "columns": self.columns,
            "rows": [{key: rounded(row[key]) for key in self.columns} for row in self.rows],
        }
        numbers, plot = folder / f"{stem}.json", folder / f"{stem}.svg"
        numbers.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        plot.write_text(standalone(svg(self.figure)), encoding="utf-8")
        return [numbers, plot]


def shown(value: Any) -> str:
    """A cell of the table on the terminal."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _with_interval(row: Mapping[str, Any]) -> str:
    return f"{row['kl']:.2g} ({row['kl_low']:.2g} to {row['kl_high']:.2g})"


def rounded(value: Any) -> Any:
    """A number as far as it is the same on every run of one machine."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


def with_interval(axes: Axes, x: list[float], rows: list[dict[str, Any]], **style: Any) -> None:
    """Plot KL with its interval, on a logarithmic scale."""
    low = [row["kl"] - row["kl_low"] for row in rows]
    high = [row["kl_high"] - row["kl"] for row in rows]
    axes.errorbar(x, [row["kl"] for row in rows], yerr=[low, high], capsize=2, **style)
    axes.set_yscale("log")
