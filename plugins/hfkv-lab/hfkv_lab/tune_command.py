"""``hfkv tune``: the cheapest setting of each layer within a quality budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import output
from .options import AsJson, Device, DType, DTypeOption, GGUFFile, Model, Report, settings

if TYPE_CHECKING:
    from hfkv.cli.settings import Setting


def main(
    model: Model,
    budget: Annotated[
        str,
        typer.Option(
            metavar="BUDGET", help="kl=0.01, bits=3.5, or kl=CACHE: no worse than that cache, such as kl=kivi:nbits=4."
        ),
    ] = "kl=0.01",
    target: Annotated[
        str | None, typer.Option(metavar="TARGET", help="What to make small within it: bits (for kl) or kl (for bits).")
    ] = None,
    cache: Annotated[
        str, typer.Option(metavar="CACHE", help="The technique, with the options that are not tuned.")
    ] = "kivi",
    group_size: Annotated[
        list[int] | None, typer.Option(metavar="N", help="A group size to try; may be repeated. 32, 64, 128.")
    ] = None,
    residual_length: Annotated[
        list[int] | None, typer.Option(metavar="N", help="A residual length to try; may be repeated. 128, 64, 32.")
    ] = None,
    sink_length: Annotated[
        list[int] | None, typer.Option(metavar="N", help="A number of sinks to try; may be repeated. 4.")
    ] = None,
    backend: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A quantizer to try; may be repeated. rtn.")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="The context whose bytes count; 8192, or what the model takes."),
    ] = None,
    count_dtype: Annotated[
        DType,
        typer.Option(
            metavar="DTYPE", help="What a full-precision number counts as: auto, the model's own, or float16, ..."
        ),
    ] = DType.AUTO,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A text to measure on; Python's own help.", exists=True)
    ] = None,
    check_tokens: Annotated[
        tuple[int, int, int], typer.Option(metavar="ROWS PREFILL DECODED", help="Size of the text of the check.")
    ] = (1, 1024, 256),
    learn_tokens: Annotated[
        tuple[int, int, int],
        typer.Option(metavar="ROWS PREFILL DECODED", help="Size of the text that single layers are measured on."),
    ] = (1, 512, 96),
    search_tokens: Annotated[
        tuple[int, int, int],
        typer.Option(metavar="ROWS PREFILL DECODED", help="Size of the text that candidates are measured on."),
    ] = (2, 1024, 128),
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where the result goes; tuned-MODEL by default.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget what an earlier run has measured.")] = False,
    gguf_file: GGUFFile = None,
    dtype: DTypeOption = DType.FLOAT32,
    device: Device = "cpu",
    as_json: AsJson = False,
    report: Report = None,
) -> None:
    """Find per-layer bits of keys and values, and group sizes, with the fewest bytes within a quality budget."""
    output.check_report(report)
    kind, limit, like = _budget(budget, target)
    folder = out or Path(f"tuned-{Path(model).name}")
    console = output.console(as_json)
    from hfkv.cli.console import working

    with working(console, "importing torch and transformers"):
        from hfkv.cli import comparison

        from . import text as texts
        from .tune_run import Plan, run
        from .tune_space import Space
    (technique,) = settings([cache])
    chosen = {
        "group_sizes": group_size,
        "residual_lengths": residual_length,
        "sink_lengths": sink_length,
        "backends": backend,
    }
    space = Space(technique, **{name: tuple(dict.fromkeys(values)) for name, values in chosen.items() if values})
    space.check()
    loaded, tokenizer, name = comparison.load(console, model, gguf_file, dtype.value, device)
    limit_of_model = getattr(loaded.config.get_text_config(decoder=True), "max_position_embeddings", None) or 2**31
    plan = Plan(
        name=name,
        budget=budget,
        kind=kind,
        limit=limit,
        like=like,
        context=context or min(8192, limit_of_model),
        counted=str(loaded.dtype).removeprefix("torch.") if count_dtype is DType.AUTO else count_dtype.value,
        text=texts.read(text).content,
        check=check_tokens,
        learn=learn_tokens,
        search=search_tokens,
    )
    folder.mkdir(parents=True, exist_ok=True)
    page = run(console, loaded, tokenizer, space, plan, folder / "state.json", fresh)
    tuned = page.data
    write(folder, tuned.cache_implementation, tuned.cache_config)
    output.finish(console, page, as_json=as_json, report=report)
    console.print(f"written: {folder}/cache_config.json and generation_config.json", markup=False, soft_wrap=True)


def write(folder: Path, name: str, options: dict[str, Any]) -> None:
    """The two files: the ``cache_config`` alone, and what a model's ``generation_config.json`` has in addition."""
    for file, content in (
        ("cache_config.json", options),
        ("generation_config.json", {"hfkv": {"cache": name, **options}}),
    ):
        (folder / file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _budget(text: str, target: str | None) -> tuple[str, float | None, Setting | None]:
    """The kind of a budget, and its limit or the cache that it is to be like.

    Raises
    ------
    typer.BadParameter
        Not of this form, or a target that the budget is of.
    """
    kind, _, value = text.partition("=")
    if kind not in ("kl", "bits") or not value:
        raise typer.BadParameter(f"{text!r} is not of the form kl=0.01, kl=CACHE or bits=3.5", param_hint="--budget")
    other = {"kl": "bits", "bits": "kl"}[kind]
    if target not in (None, other):
        raise typer.BadParameter(
            f"{target!r} does not go with --budget {text}. Fix: --target {other}", param_hint="--target"
        )
    try:
        limit = float(value)
    except ValueError:
        if kind == "kl":
            (like,) = settings([value])
            return kind, None, like
        raise typer.BadParameter(f"{text!r}: {value!r} is not a number", param_hint="--budget") from None
    if not limit > 0:
        raise typer.BadParameter(f"{text!r} must be above zero", param_hint="--budget")
    return kind, limit, None
