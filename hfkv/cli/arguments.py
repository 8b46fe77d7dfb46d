"""Arguments that commands share, ours and those of plugins, as typer reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A Hub id or a folder; smollm2 and gemma3-270m come from packages.")
]
TextFile = Annotated[
    Path | None,
    typer.Option("--text", metavar="FILE", help="The text; by default Python's own help.", exists=True, dir_okay=False),
]
SplitTextFile = Annotated[
    Path | None,
    typer.Option(
        "--text",
        metavar="FILE",
        help="The text, its last tenth held out; by default Python's own help.",
        exists=True,
        dir_okay=False,
    ),
]
Dataset = Annotated[
    str | None,
    typer.Option("--dataset", metavar="NAME", help="Text from a data set on the Hub: NAME or NAME:CONFIG."),
]
Field = Annotated[str, typer.Option("--field", metavar="NAME", help="The field of that data set.")]
Device = Annotated[str, typer.Option("--device", metavar="DEVICE", help="Where the model runs.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")]
