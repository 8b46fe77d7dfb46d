"""The report of ``hfkv demo``: plain data, and how it is shown."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import PreTrainedModel

from .. import __version__
from ..weights.report import WeightReport, describe
from .comparison import Compared
from .measure import Run
from .quality import Quality


def about(model: PreTrainedModel, name: str, prompt_tokens: int, new_tokens: int) -> dict[str, Any]:
    """What was run, on what; ``caches`` is filled with an `entry` for each."""
    return {
        "model": name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "threads": torch.get_num_threads(),
        "versions": {"hfkv": __version__, "transformers": transformers.__version__, "torch": torch.__version__},
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "weights": None,
        "quality": None,
        "caches": [],
    }


def weights_entry(label: str, report: WeightReport, plain: PreTrainedModel) -> dict[str, Any]:
    """What is said of quantized weights: their bytes, and those of the model as it was."""
    return {
        "label": label,
        "bits_per_weight": report.bits_per_weight,
        "stored_bytes": report.stored_bytes,
        "plain_bytes": describe(plain).stored_bytes,
    }


def entry(compared: Compared, run: Run, plain: Run, quality: Quality | None) -> dict[str, Any]:
    """One row's part of the report."""
    return {
        "weights": compared.weights or None,
        "cache": compared.setting.name,
        "options": compared.setting.options,
        "label": compared.label,
        "kernel": run.kernel,
        "tokens_per_second": run.tokens_per_second,
        "seconds_to_first_token": run.seconds_to_first_token,
        "stored_bytes": run.memory.stored_bytes,
        "bits_per_element": run.memory.bits_per_element,
        "ratio": plain.memory.stored_bytes / run.memory.stored_bytes,
        "kl": None if quality is None else quality.kl,
        "top1": None if quality is None else quality.top1,
        "text": run.text,
    }


def introduce(console: Console, report: dict[str, Any], end_of_prompt: str) -> None:
    """Say what will be run."""
    threads = f", threads: {report['threads']}" if report["device"] == "cpu" else ""
    console.print(f"{report['model']}, {report['dtype']}, {report['device']}{threads}", soft_wrap=True)
    console.print(f"prompt: {report['prompt_tokens']:,} tokens; then {report['new_tokens']:,} new ones with each cache")
    console.print(f"... {end_of_prompt.strip()}\n", style="dim", markup=False, soft_wrap=True)


def show(console: Console, report: dict[str, Any]) -> None:
    """Print the table, a row for each cache and the plain one first, and what its columns mean."""
    table = Table(header_style="bold", pad_edge=False, box=None, padding=(0, 2, 0, 0))
    table.add_column("\nweights + cache" if report["weights"] else "\ncache", overflow="fold")
    for header in ("\ntokens/s", "first\ntoken", "\nstored", "bits per\nelement", "\nratio", "\nKL", "same\ntop 1"):
        table.add_column(header, justify="right", no_wrap=True)
    for item in report["caches"]:
        rate, kl, top1 = item["tokens_per_second"], item["kl"], item["top1"]
        table.add_row(
            escape(item["label"]),
            "-" if rate is None else f"{rate:.1f}",
            f"{item['seconds_to_first_token']:.1f} s",
            f"{item['stored_bytes'] / 2**20:.1f} MiB",
            f"{item['bits_per_element']:.1f}",
            f"{item['ratio']:.1f}x",
            "-" if kl is None else f"{kl:.4f}",
            "-" if top1 is None else f"{top1:.1%}",
        )
    console.rule(style="dim")
    console.print(table)
    console.print()
    for line in _notes(report):
        console.print(escape(line), style="dim")


def _notes(report: dict[str, Any]) -> list[str]:
    notes = [
        "tokens/s: after the first token. One warm-up call of each is not counted.",
        "stored: keys and values at the end. ratio: plain's bytes to this cache's.",
    ]
    weights = report["weights"]
    if weights:
        notes.append(
            "{label}: {bits_per_weight:.3f} bits per quantized weight; the model takes {now:.0f} MiB in place of "
            "{before:.0f}.".format(
                **weights, now=weights["stored_bytes"] / 2**20, before=weights["plain_bytes"] / 2**20
            )
        )
    if report["quality"]:
        notes.append(
            "KL, same top 1: to plain, decoding {tokens} given tokens after {prefill:,}, {chunk} at a time.".format(
                **report["quality"]
            )
        )
    kernels = list(dict.fromkeys(item["kernel"] for item in report["caches"] if item["kernel"]))
    if kernels:
        faster = " 'hfkv[cpu]' and 'hfkv[triton]' bring faster ones." if "reference" in kernels else ""
        notes.append(f"The kernel that reads what is packed: {', '.join(kernels)} (hfkv list --kernels).{faster}")
    return notes
