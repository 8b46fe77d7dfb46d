"""``hfkv inspect``: what a model's keys, values, attention and weights look like, and which geometry they ask for."""

from __future__ import annotations

from typing import Annotated

import typer

from hfkv.cli import arguments
from hfkv.cli.models import DEFAULT

from . import options
from .output import check_report, console, finish
from .progress import steps


def main(
    model: options.Model = DEFAULT,
    tokens: Annotated[int, typer.Option(metavar="N", min=2, help="Tokens to read.")] = 1024,
    queries: Annotated[
        int, typer.Option(metavar="N", min=1, help="How many of the last tokens' attention to look at.")
    ] = 64,
    text: arguments.TextFile = None,
    dataset: arguments.Dataset = None,
    field: arguments.Field = "text",
    gguf_file: options.GGUFFile = None,
    dtype: options.DTypeOption = options.DType.FLOAT32,
    device: options.Device = "cpu",
    as_json: options.AsJson = False,
    report: options.Report = None,
) -> None:
    """Look at keys, values, attention, the residual stream and the weights; say which cache options they ask for."""
    check_report(report)
    out = console(as_json)
    from hfkv.cli.console import working

    with working(out, "importing torch and transformers"):
        from hfkv.cli import comparison, texts

        from .inspect_page import page
        from .inspection import inspect
        from .provenance import made_with
    content = texts.read(text, dataset, field)
    loaded, tokenizer, name = comparison.load(out, model, gguf_file, dtype.value, device)
    with steps(out, 1) as bar:
        found = inspect(loaded, tokenizer, content.content, tokens, queries, bar)
    finish(out, page(found, made_with(loaded, name, content.source)), as_json=as_json, report=report)
