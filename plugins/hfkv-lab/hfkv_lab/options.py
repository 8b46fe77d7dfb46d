"""The options that the commands share, as typer reads them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from hfkv.cli.arguments import AsJson as AsJson
from hfkv.cli.arguments import Device as Device
from hfkv.cli.arguments import Model as Model
from hfkv.cli.models import DType as DType
from hfkv.cli.settings import Setting, parse_cache

GGUFFile = Annotated[
    str | None, typer.Option("--gguf-file", metavar="FILE", help="The GGUF file in that folder or repository.")
]
Caches = Annotated[
    list[str] | None,
    typer.Option(
        "--cache", metavar="CACHE", help="NAME, NAME:key=value,key=value or a JSON file of tune's; may be repeated."
    ),
]
DTypeOption = Annotated[
    DType, typer.Option("--dtype", metavar="DTYPE", help="float32, bfloat16, float16 or auto, the checkpoint's own.")
]
Report = Annotated[
    Path | None,
    typer.Option("--report", metavar="FILE", help="Write an HTML page with the plots.", dir_okay=False),
]


def settings(caches: Sequence[str]) -> list[Setting]:
    """The caches that ``--cache`` names, checked before a model is loaded.

    Raises
    ------
    typer.BadParameter
        A text that is no cache, a name that nothing provides, an option that the cache does not have.
    """
    try:
        parsed = [parse_cache(text) for text in caches]
        for setting in parsed:
            setting.check()
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(str(error), param_hint="--cache") from error
    return parsed
