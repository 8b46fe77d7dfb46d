"""``hfkv plan``: what fits on a card, and how fast it could be, by arithmetic alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hfkv import registry
from hfkv.cli.settings import Setting
from hfkv.specs import CacheSpec

from . import output
from .options import AsJson, Caches, Report, settings

if TYPE_CHECKING:
    from .cards import Card

MEMORIES = (8e9, 16e9, 24e9, 80e9)
WEIGHTS = ("bfloat16", "int8", "int4")
DRAFT_LENGTHS = tuple(range(1, 9))


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

        from .arguments import parse_quantity
        from .plan import CachePlan
        from .plan_model import from_name, from_numbers
        from .plan_run import Question, plan
        from .plan_weights import parse_weights
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
    sizes = [parse_quantity("--memory", text, 1e9, ("b",)) for text in memory or ()]
    found = _card(card, sizes, bandwidth, flops)
    if found is None:
        _refuse_without_card(
            {"--bandwidth": bandwidth, "--flops": flops, "--acceptance": acceptance, "--requests": requests,
             "--batch": None if batch == 1 else batch, "--draft-length": draft_length}
        )  # fmt: skip
    if draft_length and acceptance is None:
        raise typer.BadParameter("--draft-length needs --acceptance", param_hint="--draft-length")
    question = Question(
        users=users,
        context=context,
        memories=tuple(sizes or ([found.memory] if found else MEMORIES)),
        overhead=parse_quantity("--overhead", overhead, 1e9, ("b",)),
        card=found,
        batch_size=batch,
        acceptance=acceptance,
        draft_lengths=(draft_length,) if draft_length else DRAFT_LENGTHS,
        draft_cost=draft_cost,
        requests=requests,
        answer_tokens=answer_tokens,
        answer_spread=answer_spread,
    )
    with working(out, f"reading the config of {model}" if model else "counting"):
        planned = from_numbers(**numbers) if model is None else from_name(model, numbers)
        page = plan(planned, formats, [CachePlan(planned, one, getattr(torch, dtype)) for one in chosen], question)
    output.finish(out, page, as_json=as_json, report=report)


def _card(name: str | None, sizes: Sequence[float], bandwidth: str | None, flops: str | None) -> Card | None:
    """The card by name, with what is said of it in place of what is known; None where nothing says how fast it is."""
    from .arguments import parse_quantity
    from .cards import Card, find_card

    if name:
        found = find_card(name)
    elif bandwidth and flops:
        found = Card("the card", MEMORIES[-1], 0, 0)
    else:
        return None
    return Card(
        found.name,
        sizes[0] if sizes else found.memory,
        parse_quantity("--bandwidth", bandwidth, 1e9, ("b/s", "b")) if bandwidth else found.bandwidth,
        parse_quantity("--flops", flops, 1.0, ("flop/s", "flops")) if flops else found.flops,
    )


def _refuse_without_card(given: Mapping[str, Any]) -> None:
    """Refuse options that only a card's speed gives a meaning."""
    for option, value in given.items():
        if value is not None:
            raise typer.BadParameter(f"{option} needs a --card, or both --bandwidth and --flops", param_hint=option)


def _caches() -> list[Setting]:
    """The plain cache, and kivi where it is installed."""
    widths = (8, 4, 2) if "kivi" in registry.manager().specs(CacheSpec) else ()
    return [Setting("dynamic"), *(Setting("kivi", {"nbits": width}) for width in widths)]
