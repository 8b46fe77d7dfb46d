"""``hfkv demo``: a real model with the plain cache and with kivi, side by side; with quantized weights too."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import registry
from ..specs import CacheSpec
from .models import DEFAULT, DType
from .settings import PLAIN, Setting, parse_cache
from .weights import WeightSetting, parse_weights

CACHES = ("kivi:nbits=4", "kivi:nbits=2")
PROMPT_TOKENS = 2100


def main(
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="A Hub id or a folder; smollm2 and gemma3-270m come from packages.")
    ] = DEFAULT,
    gguf_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="The GGUF file in that folder or repository.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The text to continue; by default Python's own help.")
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file with that text.", exists=True, dir_okay=False)
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help=f"Use only the first N tokens of it; {PROMPT_TOKENS} of Python's help."),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="How many tokens to generate with each cache.")
    ] = 64,
    cache: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CACHE",
            help=f"NAME or NAME:key=value,key=value; may be repeated. By default {' and '.join(CACHES)}.",
        ),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="An option of all these caches; may be repeated."),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="WEIGHTS",
            help="The same with quantized weights: NAME or NAME-TYPE, such as rtn-int4 or bnb-nf4, with "
            ":key=value,key=value for its options.",
        ),
    ] = None,
    dtype: Annotated[
        DType | None,
        typer.Option(
            metavar="DTYPE",
            help="float32, bfloat16, float16 or auto, the checkpoint's own. By default float32, and bfloat16 with "
            "--weights, whose fast products are of it.",
        ),
    ] = None,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="Where the model runs.")] = "cpu",
    no_quality: Annotated[
        bool, typer.Option("--no-quality", help="Do not measure what each cache costs in quality.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, and nothing else.")] = False,
) -> None:
    """Generate from a long prompt with the plain cache and with others; compare speed, bytes and quality."""
    settings = _settings(cache or (), option or ())
    quantized = _weights(weights)
    dtype = dtype or (DType.FLOAT32 if quantized is None else DType.BFLOAT16)
    if prompt is not None and prompt_file is not None:
        raise typer.BadParameter("pass one of --prompt and --prompt-file", param_hint="--prompt-file")
    text = prompt_file.read_text(encoding="utf-8") if prompt_file is not None else prompt
    if text is not None and not text.strip():
        raise typer.BadParameter("the text is empty", param_hint="--prompt")

    from rich.console import Console

    from .console import working

    # with --json, stdout is the report's alone
    console = Console(highlight=False, file=sys.stderr if as_json else sys.stdout)
    with working(console, "importing torch and transformers"):
        from ..weights.report import describe
        from . import comparison
        from .report import about, entry, introduce, show, weights_entry
    _check(settings, quantized)
    loaded, tokenizer, name = comparison.load(console, model, gguf_file, dtype.value, device)
    if text is None and prompt_tokens is None:
        prompt_tokens = PROMPT_TOKENS
    input_ids = comparison.encode(tokenizer, loaded, text, prompt_tokens, max_new_tokens)
    report = about(loaded, name, input_ids.shape[1], max_new_tokens)
    if not as_json:
        introduce(console, report, str(tokenizer.decode(input_ids[0, -32:])))
    rows = [comparison.Compared(loaded, PLAIN)]
    if quantized is None:
        rows += [comparison.Compared(loaded, setting) for setting in settings]
    else:
        small = comparison.quantized(console, loaded, tokenizer, quantized)
        rows += [comparison.Compared(small, setting, quantized.label) for setting in (PLAIN, *settings)]
        report["weights"] = weights_entry(quantized.label, describe(small), loaded)
    runs = comparison.generate_all(console, tokenizer, input_ids, rows, max_new_tokens, show_text=not as_json)
    costs: list[Any] = [None] * len(rows)
    if not no_quality:
        costs, report["quality"] = comparison.qualities(console, tokenizer, rows)
    for row, run, cost in zip(rows, runs, costs, strict=True):
        report["caches"].append(entry(row, run, runs[0], cost))
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        show(console, report)


def _settings(caches: Sequence[str], options: Sequence[str]) -> list[Setting]:
    """The caches to compare with the plain one; names are checked at once, options once torch is there."""
    if not caches and "kivi" not in registry.manager().specs(CacheSpec):
        raise ImportError("the demo compares with kivi, which is not installed. Fix: pip install 'hfkv[kivi]'")
    try:
        settings = [parse_cache(text, options) for text in caches or CACHES]
        for setting in settings:
            if setting.name not in registry.RESERVED[CacheSpec]:
                registry.manager().find(CacheSpec, setting.name, "cache")
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--cache") from error
    return settings


def _weights(text: str | None) -> WeightSetting | None:
    try:
        return None if text is None else parse_weights(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--weights") from error


def _check(settings: Sequence[Setting], weights: WeightSetting | None) -> None:
    for setting in settings:
        try:
            setting.check()
        except (ValueError, TypeError) as error:
            raise typer.BadParameter(str(error), param_hint="--cache") from error
    try:
        if weights is not None:
            weights.config()
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(str(error), param_hint="--weights") from error
