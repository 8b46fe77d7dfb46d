"""The tables and plots of ``hfkv bench``."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .bench import Bench, Load, Measured, knee
from .page import Figure, Page, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas


def page(title: str, facts: Mapping[str, str], found: Bench, contexts: Sequence[int], batches: Sequence[int]) -> Page:
    """Everything that was measured.

    Parameters
    ----------
    contexts
        Lengths that all caches were measured at, with the first batch size.
    batches
        Batch sizes that all caches were measured at, with the first length.
    """
    parts: list[Table | Figure] = [_times(found), _bytes(found)]
    knees: dict[str, int | None] = {}
    if len(contexts) > 1:
        parts.append(_context_figure(found, contexts, batches[0]))
    if len(batches) > 1:
        knees = {
            label: None if index is None else _batches(found, label, contexts[0])[index].load.batch_size
            for label, index in _knees(found, contexts[0]).items()
        }
        parts += [_batch_table(knees, found, contexts[0]), _batch_figure(found, contexts[0])]
    return Page(title, dict(facts), parts, data(found, knees))


def data(found: Bench, knees: Mapping[str, int | None]) -> dict[str, Any]:
    """What ``--json`` prints."""
    return {
        "runs": [
            {
                "cache": one.cache,
                "batch": one.load.batch_size,
                "context": one.load.context,
                "new_tokens": one.load.new_tokens,
                "seconds_to_first_token": one.first_token,
                "seconds_per_token": one.per_token,
                "tokens_per_second": statistics.median(one.tokens_per_second),
                "stored_bytes": one.stored_bytes,
                "peak_bytes": one.peak_bytes,
            }
            for one in found.measured
        ],
        "knees": dict(knees),
        "skipped": found.skipped,
        "peak_method": found.peak_method,
    }


def _spread(values: Sequence[float], form: str) -> str:
    """The median, and half the range where there is one."""
    middle = format(statistics.median(values), form)
    return middle if len(values) == 1 else f"{middle} ± {format((max(values) - min(values)) / 2, form)}"


def _name(load: Load) -> str:
    return f"{load.batch_size} x {load.context:,}"


def _times(found: Bench) -> Table:
    rows = []
    first: dict[Load, Measured] = {}
    for one in found.measured:
        reference = first.setdefault(one.load, one)
        speed = statistics.median(reference.per_token) / statistics.median(one.per_token)
        rows.append(
            (
                _name(one.load),
                one.cache,
                _spread([1e3 * seconds for seconds in one.first_token], ".0f"),
                _spread([1e3 * seconds for seconds in one.per_token], ".1f"),
                f"{statistics.median(one.tokens_per_second):.1f}",
                f"{speed:.2f}x",
            )
        )
    notes = [
        f"load: batch x tokens of a prompt. Medians of {len(found.measured[0].per_token)} rounds in turns, ± half the "
        "range.",
        "ms per token: the median step of a run. speed: the first cache's ms per token to this one's.",
        *(f"{label}: skipped, {reason}." for label, reason in found.skipped.items()),
    ]
    return Table("Times", ("load", "cache", "ms to first", "ms per token", "tokens/s", "speed"), rows, notes)


def _bytes(found: Bench) -> Table:
    rows = []
    first: dict[Load, Measured] = {}
    for one in found.measured:
        reference = first.setdefault(one.load, one)
        rows.append(
            (
                _name(one.load),
                one.cache,
                f"{one.stored_bytes / 2**20:.1f} MiB",
                f"{reference.stored_bytes / one.stored_bytes:.2f}x",
                f"{statistics.median(one.peak_bytes) / 2**20:.0f} MiB",
            )
        )
    notes = [
        "stored: keys and values at the end. ratio: the first cache's bytes to this one's.",
        f"peak: {found.peak_method}, above the start of the call; the prompt's activations are in it.",
    ]
    return Table("Bytes", ("load", "cache", "stored", "ratio", "peak"), rows, notes)


def _labels(found: Bench) -> list[str]:
    return list(dict.fromkeys(one.cache for one in found.measured))


def _batches(found: Bench, label: str, context: int) -> list[Measured]:
    """A cache's runs at one length, by batch size."""
    runs = [one for one in found.measured if one.cache == label and one.load.context == context]
    return sorted(runs, key=lambda one: one.load.batch_size)


def _latency(runs: Sequence[Measured]) -> list[float]:
    return [1e3 * statistics.median(one.per_token) for one in runs]


def _throughput(runs: Sequence[Measured]) -> list[float]:
    return [statistics.median(one.tokens_per_second) for one in runs]


def _knees(found: Bench, context: int) -> dict[str, int | None]:
    """For each cache, the index of the batch size at which the curve bends; None where it does not."""
    by_label = {label: _batches(found, label, context) for label in _labels(found)}
    return {label: knee(_latency(runs), _throughput(runs)) for label, runs in by_label.items()}


def _batch_table(knees: Mapping[str, int | None], found: Bench, context: int) -> Table:
    rows = []
    for label in _labels(found):
        for one in _batches(found, label, context):
            rows.append(
                (
                    label,
                    f"{one.load.batch_size}",
                    f"{_latency([one])[0]:.1f} ms",
                    f"{_throughput([one])[0]:.1f}",
                    "knee" if knees[label] == one.load.batch_size else "",
                )
            )
    return Table(
        f"Throughput against latency at {context:,} tokens",
        ("cache", "batch", "per token", "tokens/s", ""),
        rows,
        [
            "knee: beyond it, the curve of tokens/s over ms per token is flatter than on average. None: it does not "
            "flatten, and a larger batch may still pay."
        ],
    )


def _context_figure(found: Bench, contexts: Sequence[int], batch: int) -> Figure:
    def draw(canvas: Canvas) -> None:
        left, right = canvas.subplots(1, 2)
        for label in _labels(found):
            runs = [one for one in found.measured if one.cache == label and one.load.batch_size == batch]
            runs = sorted((one for one in runs if one.load.context in contexts), key=lambda one: one.load.context)
            where = [one.load.context for one in runs]
            left.plot(where, _latency(runs), marker="o", label=label)
            right.plot(where, [one.stored_bytes / 2**20 for one in runs], marker="o")
        left.set_ylabel("ms per token")
        right.set_ylabel("MiB stored")
        for axes in (left, right):
            axes.set_xlabel("tokens of context")
            axes.set_ylim(bottom=0)
        canvas.legend(loc="outside upper center", ncols=3)

    return Figure(
        "Over context", draw, "Milliseconds per token and stored bytes over the context, a line for each cache."
    )


def _batch_figure(found: Bench, context: int) -> Figure:
    def draw(canvas: Canvas) -> None:
        axes = canvas.subplots()
        for label, index in _knees(found, context).items():
            runs = _batches(found, label, context)
            (line,) = axes.plot(_latency(runs), _throughput(runs), marker="o", label=label)
            if index is not None:
                axes.plot(
                    [_latency(runs)[index]],
                    [_throughput(runs)[index]],
                    marker="o",
                    markersize=13,
                    fillstyle="none",
                    color=line.get_color(),
                )
            for one, x, y in zip(runs, _latency(runs), _throughput(runs), strict=True):
                axes.annotate(f"{one.load.batch_size}", (x, y), textcoords="offset points", xytext=(6, -10), fontsize=8)
        axes.set_xlabel("ms per token")
        axes.set_ylabel("tokens/s, all rows")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.legend()

    return Figure(
        "Throughput against latency",
        draw,
        "Tokens per second over milliseconds per token: a line for each cache, a point for each batch size.",
        notes=["A number is a batch size; the ring is the knee."],
    )
