"""``hfkv eval``: what a cache costs in quality, measured while decoding from it; and the studies."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from hfkv.cli import arguments
from hfkv.cli.models import DEFAULT
from hfkv.cli.weights import parse_weights

from . import options
from .output import check_report, console, finish
from .parts import PARTS
from .progress import steps

CACHES = ("kivi", "kivi:nbits=2")
PREFILL, TOKENS, CHUNK = 1024, 512, 16


def main(
    model: options.Model = DEFAULT,
    cache: options.Caches = None,
    study: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Run a study instead: axes, residual, group, rope or granularity."),
    ] = None,
    weights: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WEIGHTS",
            help="The same model with quantized weights, NAME or NAME-TYPE (rtn-int4, bnb-nf4) or either with "
            ":key=value,key=value, on the plain cache; may be repeated.",
        ),
    ] = None,
    part: Annotated[
        list[str] | None,
        typer.Option(metavar="PART", help=f"Measure only this; may be repeated. All by default: {', '.join(PARTS)}."),
    ] = None,
    text: arguments.TextFile = None,
    dataset: arguments.Dataset = None,
    field: arguments.Field = "text",
    windows: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Pieces of the text: 3, and 2 in a study.")
    ] = None,
    prefill: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens of each piece that are read before anything is measured.")
    ] = PREFILL,
    tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens of each piece that are decoded and compared.")
    ] = TOKENS,
    chunk: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of each forward while decoding.")] = CHUNK,
    new_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens of free greedy decoding after each prefill.")
    ] = 48,
    gguf_file: options.GGUFFile = None,
    dtype: options.DTypeOption = options.DType.FLOAT32,
    device: options.Device = "cpu",
    save: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write a study's numbers and its figure there.", file_okay=False),
    ] = None,
    as_json: options.AsJson = False,
    report: options.Report = None,
) -> None:
    """Measure what caches cost in quality, against transformers' plain cache; or run one of the field's ablations."""
    sizes: dict[str, Any] = {} if windows is None else {"windows": windows}
    sizes |= {"prefill": prefill, "tokens": tokens, "chunk": chunk}
    _check(study, {"--cache": cache, "--weights": weights, "--part": part}, sizes, save)
    check_report(report)
    settings = options.settings(cache or (() if weights else CACHES))

    given = [parse_weights(name) for name in weights or ()]
    out = console(as_json)
    from hfkv.cli.console import working

    with working(out, "importing torch and transformers"):
        from hfkv.cli import comparison, texts
    for found in given:
        # wrong options are refused before a model is loaded
        found.config()
    content = texts.read(text, dataset, field)
    loaded, tokenizer, name = comparison.load(out, model, gguf_file, dtype.value, device)
    if study is not None:
        _study(out, study, loaded, tokenizer, name, model, content, sizes, save, as_json, report)
        return
    from .candidates import candidates
    from .eval_page import page
    from .evaluate import EvalOptions, count_steps, evaluate
    from .provenance import made_with
    from .quantized import with_weights

    chosen = EvalOptions(parts=tuple(part or PARTS), new_tokens=new_tokens, **sizes)
    compared = [*candidates(loaded, settings), *(with_weights(loaded, tokenizer, each) for each in given)]
    with steps(out, count_steps(chosen, len(compared))) as bar:
        results = evaluate(compared, tokenizer, content.content, chosen, bar)
    finish(out, page(results, chosen, made_with(loaded, name, content.source)), as_json=as_json, report=report)


def _check(study: str | None, given: dict[str, list[str] | None], sizes: dict[str, int], save: Path | None) -> None:
    """Refuse what a study or an evaluation would ignore, and names that are not there."""
    from .studies import STUDIES, WITHOUT_TEXT

    if study is not None and study not in STUDIES:
        raise typer.BadParameter(f"{study!r} is not there. Choose from: {', '.join(STUDIES)}", param_hint="--study")
    for name, value in given.items():
        if study is not None and value:
            raise typer.BadParameter(f"a study has caches and measurements of its own; leave out {name} or --study")
    if study in WITHOUT_TEXT and sizes != {"prefill": PREFILL, "tokens": TOKENS, "chunk": CHUNK}:
        raise typer.BadParameter(
            f"{study} looks at weights and reads no text; leave out --windows, --prefill, --tokens and --chunk",
            param_hint="--study",
        )
    if save is not None and study is None:
        raise typer.BadParameter("only a study is saved; add --study, or use --report", param_hint="--save")
    if save is not None and not save.is_dir():
        raise typer.BadParameter(f"there is no folder {save}. Fix: make it first", param_hint="--save")
    unknown = [name for name in given["--part"] or () if name not in PARTS]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is not there. Choose from: {', '.join(PARTS)}", param_hint="--part")


def _study(
    out: Any, study: str, model: Any, tokenizer: Any, name: str, asked: str, content: Any, sizes: dict[str, Any],
    save: Path | None, as_json: bool, report: Path | None,
) -> None:  # fmt: skip
    from .ablation import AblationOptions
    from .provenance import made_with
    from .studies import run
    from .studies.record import Subject

    chosen = AblationOptions(**sizes)
    with steps(out, 1) as bar:
        found = run(study, Subject(name.partition(" (")[0], model, tokenizer, content.content, chosen, bar))
    if save is not None:
        own = {key: value for key, value in sizes.items() if value != getattr(AblationOptions(), key)}
        flags = [part for key, value in own.items() for part in (f"--{key}", str(value))]
        command = ["hfkv", "eval", asked, "--study", study, *flags]
        for path in found.save(save, f"{study}-{asked.rpartition('/')[2].lower()}", shlex.join(command)):
            out.print(f"written: {path}", markup=False, soft_wrap=True)
    finish(out, found.page(made_with(model, name, content.source)), as_json=as_json, report=report)
