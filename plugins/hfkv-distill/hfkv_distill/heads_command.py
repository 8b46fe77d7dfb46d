"""``hfkv distill-heads``: Medusa or EAGLE heads for a model, trained on what it thinks of a text."""

from __future__ import annotations

import dataclasses
import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hfkv.cli import arguments
from hfkv.cli.models import DType

if TYPE_CHECKING:
    from rich.console import Console

    from .heads.sources import Source
    from .heads.training import HeadsOptions

# beginnings of the held-out text that acceptance is simulated on while training, of those that the result is judged on
SIMULATED = 4
NEW_TOKENS = 64


class Kind(StrEnum):
    """What ``--kind`` takes."""

    MEDUSA = "medusa"
    EAGLE = "eagle"


def main(
    model: arguments.Model,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder for the heads, which is not there yet.")],
    kind: Annotated[
        Kind, typer.Option(metavar="KIND", help="medusa: heads that each look one token further; eagle: a layer.")
    ] = Kind.MEDUSA,
    minutes: Annotated[float | None, typer.Option(metavar="N", help="How long to train; 20 by default.")] = None,
    steps: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="How many steps to train, in place of a time.")
    ] = None,
    num_heads: Annotated[int | None, typer.Option(metavar="N", min=1, help="Medusa heads; 4 by default.")] = None,
    draft_vocab: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Draft the N most frequent tokens of the text alone; by default a quarter of the vocabulary.",
        ),
    ] = None,
    text: arguments.SplitTextFile = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Prompts, one a line, in place of a text: the model's own answers are what is learned.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    answer_tokens: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Tokens of each answer at most; 192 by default.")
    ] = None,
    tokens: Annotated[int, typer.Option(metavar="N", min=16, help="Tokens of each row of text.")] = 256,
    batch_size: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Rows of a step: 1 on a CPU, 8 on a GPU.")
    ] = None,
    learning_rate: Annotated[float, typer.Option(metavar="RATE", help="Of AdamW.")] = 1e-3,
    states: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Store the model's hidden states there, once; else each step computes them."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the order of the text, and of the answers.")] = 0,
    dtype: Annotated[
        DType, typer.Option(metavar="DTYPE", help="Of the model; the heads are trained in float32.")
    ] = DType.FLOAT32,
    device: arguments.Device = "cpu",
    as_json: arguments.AsJson = False,
) -> None:
    """Train drafting heads on a frozen model, and tell how many tokens each of its forwards gives with them."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise typer.BadParameter(f"{out} is there already. Fix: name a new folder", param_hint="OUT")
    if minutes is not None and steps is not None:
        raise typer.BadParameter("--minutes was given as well. Fix: leave out one of them", param_hint="--steps")
    if num_heads is not None and kind is not Kind.MEDUSA:
        raise typer.BadParameter(f"{kind} has one head. Fix: leave it out", param_hint="--num-heads")
    if prompts is not None and text is not None:
        raise typer.BadParameter("--text was given as well. Fix: leave out one of them", param_hint="--prompts")
    if answer_tokens is not None and prompts is None:
        raise typer.BadParameter("nothing is answered. Fix: add --prompts", param_hint="--answer-tokens")
    from rich.console import Console

    console = Console(highlight=False, file=sys.stderr if as_json else sys.stdout)
    from hfkv.cli.console import working

    with working(console, "importing torch and transformers"):
        from .heads.sources import Source
        from .heads.training import HeadsOptions
    options = HeadsOptions(
        kind=kind.value,
        minutes=20.0 if minutes is None and steps is None else minutes,
        steps=steps,
        batch_size=batch_size or (1 if device == "cpu" else 8),
        learning_rate=learning_rate,
        seed=seed,
    )
    shape = {} if num_heads is None else {"num_heads": num_heads}
    limit = {} if answer_tokens is None else {"answer_tokens": answer_tokens}
    source = Source(text=text, prompts=prompts, tokens=tokens, seed=seed, **limit)
    result = _run(console, model, out, options, shape, draft_vocab, source, states, dtype.value, device)
    if as_json:
        print(json.dumps(result, indent=2))


def _run(
    console: Console, name: str, out: Path, options: HeadsOptions, shape: dict[str, int], draft_vocab: int | None,
    source: Source, folder: Path | None, dtype: str, device: str,
) -> dict[str, Any]:  # fmt: skip
    from hfkv.cli import comparison
    from hfkv.cli.console import working
    from hfkv.heads import save_heads

    from .heads.acceptance import continuations
    from .heads.judging import judge
    from .heads.states import OnlineStates, States, store_states
    from .heads.training import train_heads
    from .heads.watching import watched

    model, tokenizer, title = comparison.load(console, name, None, dtype, device)
    with working(console, "reading the text") as line:
        rows, prompts = source.read(
            model, tokenizer, lambda done, total: line.say(f"answering the prompts, {done} of {total}")
        )
    with working(console, "decoding the held-out prompts") as line:
        known = continuations(model, prompts[:SIMULATED], NEW_TOKENS)
        states: States = OnlineStates(model, rows)
        if folder is not None:
            states = store_states(
                model, rows, folder, progress=lambda done, total: line.say(f"hidden states, shard {done} of {total}")
            )
    vocabulary = model.get_output_embeddings().weight.shape[0]
    if draft_vocab is not None and draft_vocab > vocabulary:
        raise ValueError(f"--draft-vocab {draft_vocab}: {title} has {vocabulary} tokens. Fix: at most that many")
    shape = {**shape, "draft_vocab_size": draft_vocab or -(-vocabulary // 4)}
    with watched(console) as watch:
        heads = train_heads(model, states, known, options, watch.log, **shape)
    save_heads(heads, out)
    with working(console, "decoding with the heads"):
        found = judge(model, out, options.kind, prompts, NEW_TOKENS)
    for each in found:
        rate = "" if each.acceptance_rate is None else f", {each.acceptance_rate:.1%} of the examined tokens accepted"
        name = each.assistant if each.branches is None else f"{each.assistant}, tree {each.branches}"
        console.print(
            f"{name}: {each.tokens_per_verification:.3f} tokens per forward{rate}; the text of plain greedy decoding "
            f"for {each.identical} of {each.prompts} prompts",
            markup=False,
            soft_wrap=True,
        )
    if not found:
        console.print("not judged: hfkv-speculative decodes with them. pip install 'hfkv[speculative]'", markup=False)
    return {
        "model": title,
        "options": dataclasses.asdict(options),
        "draft_vocab_size": shape["draft_vocab_size"],
        "rows": list(rows.shape),
        "simulated": watch.simulated,
        "judged": [dataclasses.asdict(each) for each in found],
    }
