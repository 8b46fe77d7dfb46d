"""Tables of measured figures, from the JSON files of ``docs/benchmarks/`` and ``docs/studies/``.

A file holds one table::

    {
      "title": "Quality of kivi on SmolLM2-135M",
      "plugins": ["kivi"],
      "about": "what was run and what the columns mean, in Markdown",
      "command": "the command that prints these figures",
      "versions": {"transformers": "5.24.0"},
      "columns": {"nbits": "Bits", "kl": "KL to the plain cache"},
      "rows": [{"nbits": 4, "kl": 0.0059}]
    }

``plugins`` says on whose pages the table is shown too. ``columns`` gives the keys of a row in order, with their heads.
A table may have a picture beside it: ``"figure": {"file": "axes.svg", "description": "what it shows"}``. One that is
measured in parts keeps its ``runs`` (``benchmarks/parts.py``), which are not shown.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .tables import table

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
STUDIES = Path(__file__).resolve().parents[1] / "studies"
# a table of more rows is folded
LONG = 40
KEYS = frozenset({"title", "plugins", "about", "command", "versions", "columns", "rows"})
OPTIONAL = frozenset({"figure", "runs"})


def load(folder: Path = FOLDER) -> list[dict[str, Any]]:
    """Every committed table, in the order of the file names.

    Raises
    ------
    ValueError
        A file that has other keys, a row without one of the columns, or a picture that is not there.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        figure = json.loads(path.read_text(encoding="utf-8"))
        if set(figure) - OPTIONAL != KEYS:
            raise ValueError(
                f"{path.name}: the keys must be {', '.join(sorted(KEYS))}, and {' and '.join(sorted(OPTIONAL))} may be "
                f"others; got {', '.join(sorted(figure))}"
            )
        if "figure" in figure and not (folder / figure["figure"]["file"]).is_file():
            raise ValueError(f"{path.name}: there is no file {figure['figure']['file']} beside it")
        for row in figure["rows"]:
            if set(row) != set(figure["columns"]):
                raise ValueError(f"{path.name}: a row has {sorted(row)}, the columns are {sorted(figure['columns'])}")
        found.append(figure)
    return found


def every(folder: Path = FOLDER) -> str:
    """All tables, one section each."""
    return "\n\n".join(f"## {figure['title']}\n\n{_body(figure)}" for figure in load(folder))


def studies(folder: Path = STUDIES) -> str:
    """All studies: each with its picture and its table."""
    return every(folder)


def about(plugin: str, folder: Path = FOLDER, *, top: str = "") -> str:
    """The tables that concern a plugin; an empty string where nothing has been measured.

    ``top`` leads from the page that shows them to the top of the documentation.
    """
    beside = f"{top}{folder.name}/"
    shown = [figure for figure in load(folder) if plugin in figure["plugins"]]
    return "\n\n".join(f"### {figure['title']}\n\n{_body(figure, beside)}" for figure in shown)


def _body(figure: dict[str, Any], beside: str = "") -> str:
    """What is shown of a table; ``beside`` leads from the page to the table's own folder."""
    columns = figure["columns"]
    rows = [[_number(row[key]) for key in columns] for row in figure["rows"]]
    versions = ", ".join(f"{name} {version}" for name, version in figure["versions"].items())
    numbers = table(list(columns.values()), rows)
    if len(rows) > LONG:
        # blank lines inside: Markdown in HTML
        numbers = f'<details markdown="1"><summary>All {len(rows)} rows</summary>\n\n{numbers}\n\n</details>'
    picture = figure.get("figure")
    shown = [] if picture is None else [f"![{picture['description']}]({beside}{picture['file']})"]
    return "\n\n".join(
        [
            figure["about"],
            *shown,
            numbers,
            f"Command: `{figure['command']}`. With {versions}.",
        ]
    )


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
