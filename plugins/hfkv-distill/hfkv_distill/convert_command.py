"""``hfkv convert``: fewer layers, narrower ones, fewer KV heads, windows, latents, shared keys and values."""

from __future__ import annotations

import json
import re
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from hfkv.cli import arguments
from hfkv.cli.models import DType


class DropBy(StrEnum):
    """What ``--drop-by`` takes."""

    INFLUENCE = "influence"
    KL = "kl"


class ShareMap(StrEnum):
    """What ``--share-map`` takes."""

    NEIGHBOURS = "neighbours"
    SIMILAR = "similar"


def main(
    model: arguments.Model,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write, which is not there yet.")],
    drop_layers: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Drop the N layers that matter least.")
    ] = None,
    drop_by: Annotated[
        DropBy,
        typer.Option(metavar="MEASURE", help="What matters: influence, or kl, which takes a while."),
    ] = DropBy.INFLUENCE,
    width: Annotated[
        float | None, typer.Option(metavar="SHARE", help="Keep this share of hidden channels, neurons and heads: 0.75.")
    ] = None,
    kv_heads: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="KV heads, each the mean of a group of the model's.")
    ] = None,
    local: Annotated[
        str | None, typer.Option(metavar="L:F", help="L layers with a window, then F that see all tokens: 5:1.")
    ] = None,
    window: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens that a layer with a window sees.")] = 512,
    latent_rank: Annotated[
        int | None,
        typer.Option(
            metavar="R", min=1, help="Keys of all heads pass through R latents, values too; a cache has these."
        ),
    ] = None,
    share_layers: Annotated[
        str | None,
        typer.Option(metavar="N", help="N layers share keys and values, or lists of layers: [[0],[1,2]]."),
    ] = None,
    share_map: Annotated[
        ShareMap, typer.Option(metavar="MAP", help="Which N: neighbours, or similar ones, measured on the text.")
    ] = ShareMap.NEIGHBOURS,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The text that decides, its last tenth held out; by default Python's own help.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option(metavar="N", min=2, help="Tokens of each piece of the text; four decide and four judge.")
    ] = 256,
    context: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens of context for which the bytes of the cache are told.")
    ] = 4096,
    dtype: Annotated[
        DType, typer.Option(metavar="DTYPE", help="float32, bfloat16, float16 or auto, the checkpoint's own.")
    ] = DType.AUTO,
    device: arguments.Device = "cpu",
    as_json: arguments.AsJson = False,
) -> None:
    """Convert a model, and tell what that saves and what it costs before it is healed by distillation."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise typer.BadParameter(f"{out} is there already. Fix: name a new folder", param_hint="OUT")
    asked: dict[str, Any] = {
        "drop_layers": drop_layers,
        "width": width,
        "kv_heads": kv_heads,
        "local": _pattern(local),
        "latent_rank": latent_rank,
        "share_layers": _groups(share_layers),
    }
    *others, last = ("--" + name.replace("_", "-") for name in asked)
    asked = {name: value for name, value in asked.items() if value is not None}
    if not asked:
        raise typer.BadParameter(f"nothing is to be converted. Fix: {', '.join(others)} or {last}")
    _refuse_ignored(asked, drop_by, window, share_map)
    from rich.console import Console

    console = Console(highlight=False, file=sys.stderr if as_json else sys.stdout)
    from hfkv.cli.console import working

    with working(console, "importing torch and transformers"):
        from .conversions import Conversion
        from .converting import run
    conversion = Conversion(drop_by=drop_by.value, window=window, share_map=share_map.value, **asked)
    summary = run(console, model, out, conversion, text, tokens, context, dtype.value, device)
    if as_json:
        print(json.dumps(summary.as_dict(), indent=2))
    else:
        summary.show(console)


def _pattern(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None or not all(int(number) for number in match.groups()):
        raise typer.BadParameter(f"{text!r} is not of the form L:F, e.g. 5:1", param_hint="--local")
    return int(match[1]), int(match[2])


def _groups(text: str | None) -> int | list[list[int]] | None:
    if text is None:
        return None
    try:
        groups = json.loads(text)
    except ValueError:
        groups = None
    if type(groups) is not int and not isinstance(groups, list):
        raise typer.BadParameter(
            f"{text!r} is neither a number nor lists of layers, e.g. 2 or [[0],[1,2]]", param_hint="--share-layers"
        )
    return groups


def _refuse_ignored(asked: dict[str, Any], drop_by: DropBy, window: int, share_map: ShareMap) -> None:
    for option, given, needs in (
        ("--drop-by", drop_by != DropBy.INFLUENCE, "drop_layers"),
        ("--window", window != 512, "local"),
        ("--share-map", share_map != ShareMap.NEIGHBOURS, "share_layers"),
    ):
        if given and needs not in asked:
            needed = "--" + needs.replace("_", "-")
            raise typer.BadParameter(f"nothing would read it. Fix: add {needed}, or leave it out", param_hint=option)
