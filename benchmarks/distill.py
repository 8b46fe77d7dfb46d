"""Healing SmolLM2 after a conversion, by the clock: one run, one row, one curve.

    export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=2
    python benchmarks/distill.py share-layers --minutes 15 --save docs/benchmarks
    python benchmarks/distill.py share-layers --minutes 15 --objective ce --save docs/benchmarks

What is healed: `share-layers` (pairs of layers share keys and values), `drop-layers` (four layers fewer, those that
change the hidden states least) and `drop-layers-by-kl` (those whose loss costs the least KL), `kv-heads` (one head of
keys and values, the mean of three), and `cache` (SmolLM2 behind a 2-bit kivi cache without sinks, which
`--train-plain` does not show to it in training). The text is CPython's own help, its last tenth held out; conversions
are decided on the rest. `--save` writes table and curve as the documentation keeps them.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from timing import machine_line

from hfkv.cli.models import load_model
from hfkv.cli.prompts import long_text
from hfkv_distill import figure, texts
from hfkv_distill.conversions import Conversion, convert
from hfkv_distill.conversions.texts import pieces, split
from hfkv_distill.machine import has_fast_bf16
from hfkv_distill.progress import Watch
from hfkv_distill.run import OBJECTIVES, Result, RunOptions, distill

CONVERSIONS = {
    "share-layers": Conversion(share_layers=2),
    "drop-layers": Conversion(drop_layers=4),
    "drop-layers-by-kl": Conversion(drop_layers=4, drop_by="kl"),
    "kv-heads": Conversion(kv_heads=1),
}
CACHE = {"nbits": 2, "sink_length": 0, "residual_length": 32}
COLUMNS = {
    "when": "", "kl": "KL", "top1": "Top 1, %", "perplexity": "Perplexity", "removed": "KL removed, %",
}  # fmt: skip


def main() -> None:
    """Run one, and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*CONVERSIONS, "cache"])
    parser.add_argument("--objective", choices=OBJECTIVES, default="kl")
    parser.add_argument("--train-plain", action="store_true")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--held-out", type=int, help="windows that are measured; by default all of the last tenth")
    parser.add_argument("--save", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    if arguments.train_plain and arguments.what != "cache":
        parser.error("--train-plain is about the cache")
    teacher, tokenizer = load_model("smollm2", "float32")
    cached = {"cache": "kivi", "cache_config": CACHE} if arguments.what == "cache" else {}
    options = RunOptions(
        objective=arguments.objective, minutes=arguments.minutes, learning_rate=arguments.learning_rate,
        batch_size=arguments.batch_size, bf16=has_fast_bf16("cpu"), train_plain=arguments.train_plain, **cached,
    )  # fmt: skip
    data = texts.examples(tokenizer, long_text(), "pydoc_data.topics", arguments.length, arguments.held_out)
    with Watch(Console(file=sys.stderr, highlight=False)) as watch:
        student = made(teacher, tokenizer, arguments.what)
        result = distill(
            student, teacher, data, options, stage=watch.stage, show=watch.show, processing_class=tokenizer
        )
    table = described(result, options, arguments.what, len(data.held_out), arguments.length)
    print(json.dumps(table, indent=1))
    if arguments.save is not None:
        save(arguments.save, table, result, options, arguments.what)


def made(teacher: Any, tokenizer: Any, what: str) -> Any:
    """The student of a run: converted, or a copy."""
    if what == "cache":
        return copy.deepcopy(teacher)
    ids = torch.cat(pieces(tokenizer, split(long_text())[0], 4, 512))
    return convert(teacher, CONVERSIONS[what], ids)


def name_of(options: RunOptions, what: str) -> str:
    """What a run's files are called."""
    plain = "-train-plain" if options.train_plain else ""
    return f"distill-{what}-{options.objective}{plain}-{options.minutes:g}min"


def described(result: Result, options: RunOptions, what: str, windows: int, length: int) -> dict[str, Any]:
    """The table of a run, as the documentation reads it."""
    rows = [
        {
            "when": when, "kl": round(held.kl, 4), "top1": round(100 * held.top1, 1),
            "perplexity": round(held.perplexity, 2), "removed": removed,
        }
        for when, held, removed in (
            ("before", result.before, ""), ("after", result.after, round(100 * result.removed, 1)),
        )
    ]  # fmt: skip
    rows.append(
        {"when": "teacher", "kl": 0, "top1": 100, "perplexity": round(result.teacher_perplexity, 2), "removed": ""}
    )
    through = ""
    if options.cache is not None:
        through = f" Measured through kivi with {CACHE}; trained {'without' if options.train_plain else 'with'} it."
    command = ["HF_HUB_OFFLINE=1", f"OMP_NUM_THREADS={torch.get_num_threads()}", "python benchmarks/distill.py", what]
    command += ["--objective", options.objective, *(["--train-plain"] if options.train_plain else [])]
    command += [f"--minutes {options.minutes:g}", f"--learning-rate {options.learning_rate:g}", f"--length {length}"]
    command += [f"--batch-size {options.batch_size}", "--save docs/benchmarks"]
    return {
        "title": f"Healing SmolLM2-135M, {what}, {options.objective}, {options.minutes:g} minutes",
        "plugins": ["distill"],
        "about": (
            f"{result.seconds / 60:.1f} minutes of training: {result.steps} steps, {result.tokens:,} tokens of "
            f"CPython's help. KL to the original in nats, on {windows} windows of {length} tokens of the last tenth, "
            f"held out.{through} {machine_line()}."
        ),
        "command": " ".join(command),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "columns": COLUMNS,
        "rows": rows,
    }


def save(folder: Path, table: dict[str, Any], result: Result, options: RunOptions, what: str) -> None:
    """Write the table and the curve."""
    name = name_of(options, what)
    points = [(point.seconds / 60, point.loss) for point in result.curve]
    picture = figure.curve(
        f"{what}, {options.objective}: loss on the training text", "minutes", "nats per token", points
    )
    (folder / f"{name}.svg").write_text(picture, encoding="utf-8")
    described = f"The loss of each step over the minutes of training: {options.objective}, {what}."
    table = {**table, "figure": {"file": f"{name}.svg", "description": described}}
    (folder / f"{name}.json").write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
