"""``hfkv tune``: the cheapest setting of each layer within a quality budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from . import output
from .options import AsJson, Device, DType, DTypeOption, GGUFFile, Model, Report, settings
from .tune_goal import CHECK, LEARN, SEARCH, Effort, Goal, parse_goal


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
    confidence: Annotated[
        float,
        typer.Option(
            metavar="P", min=0.5, max=0.999, help="How sure a kl budget must be kept; 0.5: its mean, and no surer."
        ),
    ] = 0.95,
    learn_tokens: Annotated[
        tuple[int, int, int],
        typer.Option(metavar="ROWS PREFILL DECODED", help="Size of the text that single layers are measured on."),
    ] = LEARN,
    search_tokens: Annotated[
        tuple[int, int, int],
        typer.Option(metavar="ROWS PREFILL DECODED", help="Size of the text that candidates are measured on."),
    ] = SEARCH,
    check_tokens: Annotated[
        tuple[int, int, int],
        typer.Option(metavar="ROWS PREFILL DECODED", help="Size of the text that the result is measured on."),
    ] = CHECK,
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
    goal = _goal(budget, target)
    folder = out or Path(f"tuned-{Path(model).name}")
    console = output.console(as_json)
    from hfkv.cli.console import working

    with working(console, "importing torch and transformers"):
        from hfkv.cli import comparison, texts

        from . import tune_page
        from .progress import steps
        from .tune_run import tune
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
    own = str(loaded.dtype).removeprefix("torch.")
    limit = getattr(loaded.config.get_text_config(decoder=True), "max_position_embeddings", None) or 2**31
    effort = Effort(
        confidence=confidence,
        context=context or min(Effort.context, limit),
        counted=own if count_dtype is DType.AUTO else count_dtype.value,
        learn=learn_tokens,
        search=search_tokens,
        check=check_tokens,
    )
    folder.mkdir(parents=True, exist_ok=True)
    content = texts.read(text)
    with steps(console, 1) as bar:
        tuned = tune(
            loaded, tokenizer, content.content, goal,
            space=space, effort=effort, name=name, state_file=folder / "state.json", fresh=fresh, steps=bar,
        )  # fmt: skip
    write(folder, tuned.cache_implementation, tuned.cache_config)
    facts = {
        "model": f"{name}, {own}, {loaded.device.type}",
        "budget": f"{budget}, with a confidence of {confidence:.0%} on the text of the search",
        "bytes": f"one user at {effort.context:,} tokens; full precision counted as {effort.counted}, scales as stored",
        "text": content.source,
        **tuned.texts,
        "measured": f"{tuned.resumed} taken over from an earlier run" if tuned.resumed else "all in this run",
    }
    output.finish(console, tune_page.page(tuned, facts), as_json=as_json, report=report)
    console.print(f"written: {folder}/cache_config.json and generation_config.json", markup=False, soft_wrap=True)


def write(folder: Path, name: str, options: dict[str, Any]) -> None:
    """The two files: the ``cache_config`` alone, and what a model's ``generation_config.json`` has in addition."""
    for file, content in (
        ("cache_config.json", options),
        ("generation_config.json", {"hfkv": {"cache": name, **options}}),
    ):
        (folder / file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _goal(text: str, target: str | None) -> Goal:
    """The budget as it was written; a target may only say what follows from it."""
    try:
        goal = parse_goal(text)
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(str(error), param_hint="--budget") from error
    if target not in (None, goal.target):
        raise typer.BadParameter(
            f"{target!r} does not go with --budget {text}. Fix: --target {goal.target}", param_hint="--target"
        )
    return goal
