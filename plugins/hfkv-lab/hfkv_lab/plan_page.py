"""The tables and plots of ``hfkv plan``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from . import batching
from .page import Figure, Table
from .plan import CachePlan, Fit
from .plan_model import PlanModel
from .plan_weights import WeightFormat
from .roofline import Roofline, Speculation

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

CONTEXTS = tuple(2**power for power in range(10, 18))


def size(count: float) -> str:
    """Bytes with a unit."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:,.1f} {name}"
    return f"{count:,.0f} B"


def card_name(memory: float) -> str:
    """A card by its memory."""
    return f"{memory / 1e9:g} GB"


def weights_table(model: PlanModel, formats: Sequence[WeightFormat]) -> Table:
    """Bytes of the weights."""
    total = model.parameters.total
    rows = [
        (
            weights.name,
            size(weights.bytes_of(model.parameters)),
            f"{8 * weights.bytes_of(model.parameters) / total:.2f}",
        )
        for weights in formats
    ]
    return Table(
        "Weights", ("format", "bytes", "bits each"), rows, ["Embeddings, norms and the output layer: 16 bits."]
    )


def caches_table(caches: Sequence[CachePlan], context: int) -> Table:
    """Bytes of the caches."""
    rows = []
    for cache in caches:
        grown = cache.bytes(2 * context) - cache.bytes(context)
        rows.append(
            (
                cache.setting.label,
                f"{grown / context:,.0f} B",
                size(cache.bytes(context)),
                f"{cache.bits_per_element(context):.2f}",
                f"{caches[0].bytes(context) / cache.bytes(context):.2f}x",
            )
        )
    head = ("cache", "per token", f"at {context:,} tokens", "bits per element", "ratio")
    notes = [
        f"per token: what each one adds beyond {context:,}. Sinks, residual, scales and offsets are counted.",
        "After a prompt of that length; a packed cache that grew to it while decoding has up to 1/32 more room.",
    ]
    return Table("Cache of one user", head, rows, notes)


def fits_table(title: str, fits: Sequence[Fit], value: Callable[[Fit], str], notes: Sequence[str]) -> Table:
    """Weights and caches down, cards across."""
    cards = list(dict.fromkeys(found.memory for found in fits))
    rows: dict[tuple[str, str], list[str]] = {}
    for found in fits:
        rows.setdefault((found.weights, found.cache), []).append(value(found))
    return Table(
        title, ("weights", "cache", *map(card_name, cards)), [(*key, *cells) for key, cells in rows.items()], notes
    )


def growth_figure(model: PlanModel, caches: Sequence[CachePlan]) -> Figure:
    """Bytes over context."""
    contexts = [context for context in CONTEXTS if context <= (model.limit or CONTEXTS[-1])] or [model.limit]

    def draw(canvas: Canvas) -> None:
        axes = canvas.subplots()
        for cache in caches:
            axes.plot(contexts, [cache.bytes(context) / 2**30 for context in contexts], label=cache.setting.label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xlabel("tokens of context")
        axes.set_ylabel("GiB of cache for one user")
        axes.legend()

    return Figure("Cache over context", draw, "Bytes of one user's cache over the context, one line for each cache.")


def roofline_table(roofline: Roofline, context: int, batch_size: int) -> Table:
    """Every part of a prefill and of a decode step."""
    card = roofline.card
    rows = []
    for name, forward in (
        (f"prefill of {context:,}", roofline.prefill(context)),
        (f"decode, batch {batch_size}", roofline.decode(batch_size, context)),
    ):
        for part in forward.parts:
            bound = "bandwidth" if part.moved / card.bandwidth >= part.operations / card.flops else "compute"
            rows.append(
                (
                    name,
                    part.name,
                    size(part.moved),
                    f"{part.operations:.2e}",
                    f"{part.intensity:,.1f}",
                    bound,
                    f"{1e3 * part.seconds(card):,.3f} ms",
                )
            )
    return Table(
        f"Roofline: {roofline.weights.name} weights, {roofline.cache.setting.label} cache, {card.name}",
        ("forward", "part", "moved", "operations", "per byte", "bound by", "time"),
        rows,
        [
            f"The card does {card.flops / card.bandwidth:,.0f} operations in the time of one byte: a part with fewer "
            "is bound by the bandwidth. A bound, not a promise: real kernels reach a part of it.",
        ],
    )


def throughput_table(roofline: Roofline, context: int, batches: Sequence[int], memory: float, overhead: float) -> Table:
    """Latency and throughput over batch size."""
    rows = []
    for batch in batches:
        held = roofline.weight_bytes + batch * roofline.cache.bytes(context)
        rows.append(
            (
                f"{batch}",
                f"{1e3 * roofline.step_seconds(batch, context):,.2f} ms",
                f"{roofline.tokens_per_second(batch, context):,.0f}",
                f"{held / 1e9:,.1f} GB",
                "yes" if held + overhead <= memory else "no",
            )
        )
    return Table(
        f"Decoding at {context:,} tokens of context",
        ("batch", "per token", "tokens/s", "weights and cache", "fits"),
        rows,
    )


def throughput_figure(rooflines: Sequence[Roofline], context: int, batches: Sequence[int]) -> Figure:
    """Throughput over latency."""

    def draw(canvas: Canvas) -> None:
        axes = canvas.subplots()
        for roofline in rooflines:
            axes.plot(
                [1e3 * roofline.step_seconds(batch, context) for batch in batches],
                [roofline.tokens_per_second(batch, context) for batch in batches],
                marker="o",
                label=roofline.cache.setting.label,
            )
        axes.set_xlabel("ms per token")
        axes.set_ylabel("tokens/s, all users")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.legend()

    return Figure(
        "Throughput against latency",
        draw,
        "Tokens per second of all users over milliseconds per token: a line for each cache, a point for each batch.",
        notes=[f"Batches of {', '.join(map(str, batches))}, whether they fit or not."],
    )


def speculation_table(rounds: Sequence[Speculation], acceptance: float, draft_cost: float) -> Table:
    """Speed-up over draft length, the best one marked."""
    best = max(rounds, key=lambda found: found.speedup)
    rows = [
        (
            f"{found.draft_length}",
            f"{found.expected_tokens:.2f}",
            f"{found.cost:.2f}",
            f"{found.speedup:.2f}x",
            "best" if found is best else "",
        )
        for found in rounds
    ]
    return Table(
        f"Speculative decoding: each draft token accepted with {acceptance:g}, a draft step costs {draft_cost:g}",
        ("draft length", "tokens a round", "steps a round", "speed-up", ""),
        rows,
        ["tokens a round: (1 - a^(g+1)) / (1 - a). steps a round: drafting and verifying, in plain decode steps."],
    )


def batching_table(found: dict[str, batching.Batching], requests: int, slots: int, mean: float) -> Table:
    """Static and continuous side by side."""
    rows = [
        (
            name,
            f"{run.tokens_per_second:,.0f}",
            f"{run.mean_latency:,.1f} s",
            f"{run.seconds:,.1f} s",
            f"{run.utilization:.1%}",
        )
        for name, run in found.items()
    ]
    return Table(
        f"Batching: {requests} requests, {slots} at a time, answers of {mean:g} tokens on average",
        ("batching", "tokens/s", "mean latency", "all done", "slots in use"),
        rows,
        ["Simulated with the roofline's decode times; prompts are not counted, and all requests wait at the start."],
    )


def data(model: PlanModel, fits: Sequence[Fit], **parts: Any) -> dict[str, Any]:
    """What ``--json`` prints."""
    return {
        "model": model.name,
        "parameters": {
            "total": model.parameters.total,
            "active": model.parameters.active,
            "matrices": model.parameters.matrices,
        },
        "fits": list(fits),
        **parts,
    }
