"""``hfkv plan``: what fits on a card, and how fast it could be, by arithmetic alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from hfkv import registry
from hfkv.cli.settings import Setting
from hfkv.specs import CacheSpec

from . import output
from .options import AsJson, Caches, Report, settings

MEMORIES = (8e9, 16e9, 24e9, 80e9)
WEIGHTS = ("bfloat16", "int8", "int4")
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DRAFT_LENGTHS = range(1, 9)


def main(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="A Hub id, a folder or a packaged model; only its config is read."),
    ] = None,
    layers: Annotated[int | None, typer.Option(metavar="N", min=1, help="Layers, in place of the config's.")] = None,
    heads: Annotated[int | None, typer.Option(metavar="N", min=1, help="Query heads.")] = None,
    kv_heads: Annotated[int | None, typer.Option(metavar="N", min=1, help="Heads of keys and values.")] = None,
    head_dim: Annotated[int | None, typer.Option(metavar="N", min=1, help="Channels of a head.")] = None,
    hidden_size: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Channels of the residual stream.")
    ] = None,
    params: Annotated[float | None, typer.Option(metavar="N", min=1, help="Parameters, such as 7e9.")] = None,
    weights: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FORMAT",
            help=f"A weight format, such as int4:group_size=128; may be repeated. {', '.join(WEIGHTS)}.",
        ),
    ] = None,
    cache: Caches = None,
    dtype: Annotated[
        str, typer.Option(metavar="DTYPE", help="Of full-precision caches: float16, bfloat16, float32.")
    ] = ("float16"),
    users: Annotated[int, typer.Option(metavar="N", min=1, help="For how many the longest context is.")] = 1,
    context: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of each user.")] = 8192,
    batch: Annotated[int, typer.Option(metavar="N", min=1, help="Users of a decode step and of the batching.")] = 1,
    card: Annotated[
        str | None, typer.Option(metavar="CARD", help="A card by name: h100, a100-80gb, rtx-4090, ...")
    ] = None,
    memory: Annotated[
        list[str] | None, typer.Option(metavar="SIZE", help="Its memory, such as 24GB; may be repeated.")
    ] = None,
    bandwidth: Annotated[str | None, typer.Option(metavar="RATE", help="Its bandwidth, such as 3.35TB/s.")] = None,
    flops: Annotated[
        str | None, typer.Option(metavar="RATE", help="Its 16-bit operations a second, such as 989T.")
    ] = None,
    overhead: Annotated[
        str, typer.Option(metavar="SIZE", help="What is neither weights nor cache: the context of CUDA, activations.")
    ] = "1GB",
    acceptance: Annotated[
        float | None, typer.Option(metavar="A", help="How often a draft token is accepted: adds speculative decoding.")
    ] = None,
    draft_length: Annotated[
        int | None, typer.Option(metavar="G", min=1, help="Tokens of a draft; by default 1 to 8 are compared.")
    ] = None,
    draft_cost: Annotated[float, typer.Option(metavar="C", min=0, help="A draft step's time, in the model's.")] = 0.1,
    requests: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Simulate so many requests: static and continuous batching.")
    ] = None,
    answer_tokens: Annotated[float, typer.Option(metavar="N", min=1, help="Mean tokens of an answer.")] = 256,
    answer_spread: Annotated[
        float, typer.Option(metavar="S", min=0, help="Spread of the answers' lengths (log-normal).")
    ] = 1.0,
    as_json: AsJson = False,
    report: Report = None,
) -> None:
    """What fits: weights, caches, users and context on a card; with --card, also how fast it could be."""
    output.check_report(report)
    out = output.console(as_json)
    from hfkv.cli.console import working

    with working(out, "importing torch and transformers"):
        import torch

        from . import batching, plan_page
        from .cards import Card, find_card, parse_quantity
        from .page import Page
        from .plan import CachePlan, fit
        from .plan_model import from_name, from_numbers
        from .plan_weights import parse_weights
        from .roofline import Roofline, speculation
    numbers = {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_size": hidden_size,
        "params": params,
    }
    if dtype not in ("float16", "bfloat16", "float32"):
        raise typer.BadParameter(
            f"{dtype!r} is not known. Choose from: float16, bfloat16, float32", param_hint="--dtype"
        )
    formats = [parse_weights(text) for text in weights or WEIGHTS]
    chosen = settings(cache) if cache else _caches()
    reserve = parse_quantity("--overhead", overhead, 1e9, ("b",))
    sizes = [parse_quantity("--memory", text, 1e9, ("b",)) for text in memory or ()]
    found = find_card(card) if card else None
    if found is None and bandwidth and flops:
        found = Card("the card", max(sizes, default=MEMORIES[-1]), 0, 0)
    if found is not None:
        found = Card(
            found.name,
            sizes[0] if sizes else found.memory,
            parse_quantity("--bandwidth", bandwidth, 1e9, ("b/s", "b")) if bandwidth else found.bandwidth,
            parse_quantity("--flops", flops, 1.0, ("flop/s", "flops")) if flops else found.flops,
        )
    elif bandwidth or flops or acceptance is not None or requests:
        needs = next(
            name
            for name, value in (
                ("--bandwidth", bandwidth),
                ("--flops", flops),
                ("--acceptance", acceptance),
                ("--requests", requests),
            )
            if value
        )
        raise typer.BadParameter(f"{needs} needs a --card, or both --bandwidth and --flops", param_hint=needs)
    elif batch != 1 or draft_length:
        raise typer.BadParameter("--batch and --draft-length need a --card, or both --bandwidth and --flops")
    if draft_length and acceptance is None:
        raise typer.BadParameter("--draft-length needs --acceptance", param_hint="--draft-length")
    with working(out, f"reading the config of {model}" if model else "counting"):
        planned = from_numbers(**numbers) if model is None else from_name(model, numbers)
        if planned.limit and context > planned.limit:
            raise ValueError(f"--context {context} is more than the {planned.limit} tokens that {planned.name} takes")
        caches = [CachePlan(planned, setting, getattr(torch, dtype)) for setting in chosen]
    memories = sizes or ([found.memory] if found else list(MEMORIES))
    fits = [
        fit(planned, each, one, space, users=users, context=context, overhead=reserve)
        for each in formats
        for one in caches
        for space in memories
    ]
    fit_notes = [
        f"Memory in GB of 10^9 bytes, of which {reserve / 1e9:g} GB are kept for what is neither weights nor cache.",
    ]
    if any(one.limited for one in fits):
        fit_notes.append(f"*: the model takes no more than {planned.limit:,} tokens.")
    parts: list[Any] = [
        plan_page.weights_table(planned, formats),
        plan_page.caches_table(caches, context),
        plan_page.fits_table(
            f"Longest context for {users:,} user{'s' * (users > 1)}",
            fits,
            lambda one: f"{one.longest_context:,}{'*' * one.limited}" if one.longest_context else "-",
            fit_notes,
        ),
        plan_page.fits_table(
            f"Most users with {context:,} tokens each",
            fits,
            lambda one: f"{one.most_users:,}" if one.most_users else "-",
            (),
        ),
        plan_page.growth_figure(planned, caches),
    ]
    extra: dict[str, Any] = {
        "context": context,
        "users": users,
        "weights": {each.name: each.bytes_of(planned.parameters) for each in formats},
        "caches": {
            one.setting.label: {"bytes": one.bytes(context), "bits_per_element": one.bits_per_element(context)}
            for one in caches
        },
    }
    if found is not None:
        rooflines = [Roofline(planned, formats[0], one, found) for one in caches]
        first = rooflines[0]
        parts += [
            plan_page.roofline_table(each, context, batch) for each in (rooflines[0], rooflines[-1])[: len(rooflines)]
        ]
        parts.append(plan_page.throughput_table(first, context, BATCHES, found.memory, reserve))
        parts.append(plan_page.throughput_figure(rooflines, context, BATCHES))
        extra["roofline"] = {
            "card": found,
            "weights": formats[0].name,
            "caches": {
                each.cache.setting.label: {
                    "prefill_seconds": each.prefill(context).seconds(found),
                    "decode": [
                        {
                            "batch": size,
                            "seconds": each.step_seconds(size, context),
                            "tokens_per_second": each.tokens_per_second(size, context),
                            "bytes": each.weight_bytes + each.cache.bytes(context, size),
                        }
                        for size in sorted({*BATCHES, batch})
                    ],
                }
                for each in rooflines
            },
        }
        if acceptance is not None:
            lengths: Sequence[int] = [draft_length] if draft_length else DRAFT_LENGTHS
            rounds = [speculation(first, acceptance, length, draft_cost, batch, context) for length in lengths]
            parts.append(plan_page.speculation_table(rounds, acceptance, draft_cost))
            extra["speculation"] = [
                {
                    "draft_length": one.draft_length,
                    "expected_tokens": one.expected_tokens,
                    "cost": one.cost,
                    "speedup": one.speedup,
                }
                for one in rounds
            ]
        if requests:
            answers = batching.lengths(requests, answer_tokens, answer_spread)
            runs = {
                name: run(answers, batch, context, first.step_seconds)
                for name, run in (("static", batching.static), ("continuous", batching.continuous))
            }
            parts.append(plan_page.batching_table(runs, requests, batch, answer_tokens))
            extra["batching"] = runs
    facts = {
        "model": planned.name,
        "parameters": f"{planned.parameters.total:,}",
        "layers": f"{len(planned.shapes)}, of {planned.shapes[0].elements:,} numbers a token in the first",
        "full precision": dtype,
    }
    page = Page(f"Plan for {planned.name}", facts, parts, plan_page.data(planned, fits, **extra))
    output.finish(out, page, as_json=as_json, report=report)


def _caches() -> list[Setting]:
    """The plain cache, and kivi where it is installed."""
    widths = (8, 4, 2) if "kivi" in registry.manager().specs(CacheSpec) else ()
    return [Setting("dynamic"), *(Setting("kivi", {"nbits": width}) for width in widths)]
