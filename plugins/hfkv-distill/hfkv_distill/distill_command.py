"""``hfkv distill``: train a student towards its teacher, on the machine that is there."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from hfkv.cli import arguments
from hfkv.cli.console import working
from hfkv.cli.models import DType

if TYPE_CHECKING:
    from .run import Result, RunOptions

# characters of a data set: more than a run of an hour reads on two cores
CHARACTERS = 20_000_000
# in the folder of the result, until there is one
UNFINISHED = "unfinished"
# what fits the machine: window, windows a step
CPU, GPU = (256, 4), (1024, 8)


def main(
    teacher: Annotated[str, typer.Option(metavar="MODEL", help="The original: a folder, a Hub id, or smollm2.")],
    student: Annotated[str, typer.Option(metavar="MODEL", help="What is trained: a converted copy, or any other.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the trained student is saved.", file_okay=False)],
    text: arguments.TextFile = None,
    dataset: arguments.Dataset = None,
    field: arguments.Field = "text",
    objective: Annotated[
        str, typer.Option(metavar="NAME", help="kl, reverse-kl, jsd, or ce: the text alone, without the teacher.")
    ] = "kl",
    alpha: Annotated[float, typer.Option(metavar="SHARE", help="Share of the text's own tokens in the loss.")] = 0.0,
    temperature: Annotated[float, typer.Option(metavar="T", help="Softens both models in the loss.")] = 1.0,
    minutes: Annotated[float | None, typer.Option(metavar="M", help="Minutes of training: 15.")] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", min=1, help="Steps, in place of minutes.")] = None,
    learning_rate: Annotated[float, typer.Option(metavar="RATE", help="The highest; it rises, then falls.")] = 5e-4,
    length: Annotated[
        int | None, typer.Option(metavar="N", min=2, help="Tokens of a window: 256 on a CPU, 1024 on a GPU.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Windows of a step: 4 on a CPU, 8 on a GPU.")
    ] = None,
    accumulation: Annotated[int, typer.Option(metavar="N", min=1, help="Batches that make a step.")] = 1,
    held_out: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Windows of the last tenth that are measured: all.")
    ] = None,
    cache: Annotated[
        str | None,
        typer.Option(metavar="CACHE", help="A quantized cache to train for: kivi:nbits=2,sink_length=0, or the like."),
    ] = None,
    train_plain: Annotated[
        bool, typer.Option("--train-plain", help="With --cache: measure through it, and train without it.")
    ] = False,
    teacher_dtype: Annotated[DType, typer.Option(metavar="DTYPE", help="The teacher's precision.")] = DType.FLOAT32,
    bf16: Annotated[
        bool | None, typer.Option("--bf16/--no-bf16", help="Products in bfloat16: where the machine is fast at them.")
    ] = None,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Less memory, a third more time.")
    ] = False,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="cpu, cuda, or auto.")] = "auto",
    seed: Annotated[int, typer.Option(metavar="N", help="Of the order of the windows.")] = 0,
    checkpoint_minutes: Annotated[
        float,
        typer.Option(
            metavar="M", min=0, help="How often the state is saved, so that the same command goes on with it."
        ),
    ] = 5.0,
    as_json: arguments.AsJson = False,
) -> None:
    """Train a student towards a teacher: KL, perplexity and top 1 on held-out text, before and after."""
    if minutes is not None and steps is not None:
        raise typer.BadParameter("--minutes and --steps were both given: pass one of them", param_hint="--minutes")
    begun = out / UNFINISHED
    if out.exists() and any(out.iterdir()) and not begun.exists():
        raise ValueError(f"--out {out}: the folder is not empty, and has no run to go on with. Fix: name another")
    name, config = _cache(cache)
    console = Console(highlight=False, file=sys.stderr if as_json else sys.stdout)
    with working(console, "importing torch and transformers"):
        from hfkv.cli import comparison
        from hfkv.cli.texts import read

        from . import fingerprint, texts
        from .collator import DistillationCollator
        from .machine import chosen_device, has_fast_bf16
        from .run import RunOptions, distill
        from .unfinished import Unfinished
    place = chosen_device(device)
    window, windows = CPU if place == "cpu" else GPU
    options = RunOptions(
        objective=objective, alpha=alpha, temperature=temperature, steps=steps,
        minutes=None if steps is not None else 15.0 if minutes is None else minutes, learning_rate=learning_rate,
        batch_size=batch_size or windows, accumulation=accumulation, cache=name, cache_config=config,
        train_plain=train_plain, bf16=has_fast_bf16(place) if bf16 is None else bf16,
        gradient_checkpointing=gradient_checkpointing, seed=seed,
    )  # fmt: skip
    found = read(text, dataset, field, splits=("train",), characters=CHARACTERS)
    original, tokenizer, teacher_name = comparison.load(console, teacher, None, teacher_dtype.value, place)
    trained, _, student_name = comparison.load(console, student, None, "float32", place)
    data = texts.examples(tokenizer, found.content, found.source, length or window, held_out)
    console.print(
        f"{teacher_name} teaches {student_name}: {len(data.train):,} windows of {length or window} tokens, "
        f"{len(data.held_out):,} held out, from {found.source}; {objective}, "
        f"{place}{', bfloat16' if options.bf16 else ''}",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    names = {"teacher": teacher, "student": student, "text": found.source}
    settings = {
        **names, **dataclasses.asdict(options), "device": place, "teacher_dtype": teacher_dtype.value,
        "windows": fingerprint.of_data([*data.train, *data.held_out], DistillationCollator()),
    }  # fmt: skip
    unfinished = Unfinished(begun, checkpoint_minutes, settings)
    if unfinished.latest() is not None:
        console.print(f"going on with the run in {begun}", markup=False, soft_wrap=True)
    from .progress import Watch

    with Watch(console) as watch:
        result = distill(
            trained, original, data, options, stage=watch.stage, show=watch.show, processing_class=tokenizer,
            unfinished=unfinished,
        )  # fmt: skip
    _save(trained, tokenizer, out, result, options, names)
    shutil.rmtree(begun)
    if as_json:
        print(json.dumps(report(result, options), indent=1))
    else:
        _show(console, result, options, out)


def _cache(spelt: str | None) -> tuple[str | None, dict[str, Any]]:
    if spelt is None:
        return None, {}
    from hfkv.cli.settings import parse_cache

    try:
        setting = parse_cache(spelt)
        setting.check()
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(str(error), param_hint="--cache") from error
    return setting.name, setting.options


def report(result: Result, options: RunOptions) -> dict[str, Any]:
    """A result as JSON has it."""
    return {
        "options": dataclasses.asdict(options),
        **dataclasses.asdict(result),
        "removed": result.removed,
    }


def _save(model: Any, tokenizer: Any, out: Path, result: Result, options: RunOptions, names: dict[str, str]) -> None:
    from . import figure

    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "distillation.json").write_text(json.dumps({**names, **report(result, options)}, indent=1), encoding="utf-8")
    points = [(point.seconds / 60, point.loss) for point in result.curve]
    if points:
        title = f"Loss ({options.objective}) on the training text"
        (out / "distillation.svg").write_text(
            figure.curve(title, "minutes", "nats per token", points), encoding="utf-8"
        )


def _show(console: Console, result: Result, options: RunOptions, out: Path) -> None:
    from rich.table import Table

    measured = "" if options.cache is None else f", through {options.cache} {dict(options.cache_config) or ''}".rstrip()
    table = Table(title=f"Held-out text{measured}", title_justify="left", box=None, pad_edge=False)
    for head, justify in (("", "left"), ("KL to the teacher", "right"), ("top 1", "right"), ("perplexity", "right")):
        table.add_column(head, justify=justify)  # type: ignore[arg-type]
    for name, held in (("before", result.before), ("after", result.after)):
        table.add_row(name, f"{held.kl:.4f}", f"{100 * held.top1:.1f} %", f"{held.perplexity:.2f}")
    table.add_row("teacher", "0", "", f"{result.teacher_perplexity:.2f}")
    console.print(table)
    console.print(
        f"{100 * result.removed:.1f} % of the KL removed in {result.seconds / 60:.1f} minutes: {result.steps:,} steps, "
        f"{result.tokens:,} tokens"
    )
    console.print(f"saved: {out} (the run: distillation.json, distillation.svg)", markup=False, soft_wrap=True)
