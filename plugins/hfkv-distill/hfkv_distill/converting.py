"""The run behind ``hfkv convert``: load, convert, save, load again, compare."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from hfkv.cli import comparison
from hfkv.cli.console import working
from hfkv.cli.prompts import long_text

from .conversions import Conversion, convert
from .conversions.measure import Quality, compare, kv_bytes
from .conversions.texts import pieces, split

# pieces of text that decide, and pieces of the held-out end that judge
DECIDE, JUDGE = 4, 4
# what is written beside the model
RECORD = "conversion.json"


@dataclass(frozen=True)
class Side:
    """One of the two models.

    Attributes
    ----------
    parameters
        Weights, tied ones once.
    layers, kv_heads
        Of the config.
    kv_bytes
        Of transformers' own cache for one row of the context that was asked for.
    """

    parameters: int
    layers: int
    kv_heads: int
    kv_bytes: int


@dataclass(frozen=True)
class Summary:
    """What a conversion did.

    Attributes
    ----------
    source, text
        What was converted, and the text that decided and judged.
    conversion
        What was asked for.
    context
        Tokens that ``kv_bytes`` are for.
    quality
        Before healing, on the held-out end of the text.
    """

    source: str
    conversion: Conversion
    text: str
    context: int
    before: Side
    after: Side
    quality: Quality

    def as_dict(self) -> dict[str, Any]:
        """Plain data, with the bytes of one token of the context."""
        data = dataclasses.asdict(self)
        for side in ("before", "after"):
            data[side]["kv_bytes_per_token"] = data[side]["kv_bytes"] / self.context
        return data

    def show(self, console: Console) -> None:
        """Print a table."""
        table = Table(header_style="bold", pad_edge=False, box=None, padding=(0, 2, 0, 0))
        for header in ("", "before", "after", "after / before"):
            table.add_column(header, justify="left" if not header else "right")
        rows = {
            "parameters": (self.before.parameters, self.after.parameters),
            "layers": (self.before.layers, self.after.layers),
            "KV heads": (self.before.kv_heads, self.after.kv_heads),
            f"KV bytes, {self.context:,} tokens": (self.before.kv_bytes, self.after.kv_bytes),
        }
        for name, (before, after) in rows.items():
            table.add_row(name, f"{before:,}", f"{after:,}", f"{after / before:.3f}")
        quality = self.quality
        ratio = quality.perplexity / quality.original_perplexity
        table.add_row("perplexity", f"{quality.original_perplexity:.2f}", f"{quality.perplexity:.2f}", f"{ratio:.3g}")
        console.print(table)
        console.print(
            f"KL to the original {quality.kl:.3f} nats per token, top 1 {100 * quality.top1:.1f} %, before healing",
            markup=False,
        )


def run(
    console: Console,
    name: str,
    out: Path,
    conversion: Conversion,
    file: Path | None,
    tokens: int,
    context: int,
    dtype: str,
    device: str,
) -> Summary:
    """Convert a model into a folder; see `hfkv_distill.convert_command.main`.

    Raises
    ------
    RuntimeError
        What was saved does not load as what was converted.
    """
    content = long_text() if file is None else file.read_text(encoding="utf-8")
    model, tokenizer, title = comparison.load(console, name, None, dtype, device)
    decide, judge = split(content)
    decided_on = torch.cat(pieces(tokenizer, decide, DECIDE, tokens))
    judged_on = pieces(tokenizer, judge, JUDGE, tokens)
    with _no_other_bars(), working(console, "converting") as line:
        converted = convert(model, conversion, decided_on, line.say)
        line.say(f"writing {out}")
        converted.save_pretrained(out)
        tokenizer.save_pretrained(out)
        line.say("loading what was written")
        _check_saved(converted, out, judged_on[0][:, :64])
        line.say("comparing with the original")
        summary = Summary(
            title,
            conversion,
            "pydoc_data.topics" if file is None else file.name,
            context,
            _side(model, context),
            _side(converted, context),
            compare(model, converted, judged_on),
        )
    record = json.dumps(summary.as_dict(), indent=2)
    (out / RECORD).write_text(record + "\n", encoding="utf-8")
    return summary


@contextmanager
def _no_other_bars() -> Iterator[None]:
    """Without transformers' own progress bars, which would run into our line."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@torch.no_grad()
def _check_saved(converted: Any, out: Path, input_ids: torch.Tensor) -> None:
    loaded: Any = AutoModelForCausalLM.from_pretrained(out, dtype="auto", local_files_only=True)
    input_ids = input_ids.to(converted.device)
    if not torch.equal(loaded.to(converted.device)(input_ids).logits, converted(input_ids).logits):
        raise RuntimeError(f"the model in {out} computes something else than the one that was saved: do not use it")


def _side(model: Any, context: int) -> Side:
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return Side(model.num_parameters(), config.num_hidden_layers, heads, kv_bytes(model, context))
