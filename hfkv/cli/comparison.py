"""Caches and weights side by side: the same model, the same prompt, the same number of new tokens."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.markup import escape
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..weights.quantize import quantize_weights
from . import models
from .console import Working, working
from .measure import Run, generate
from .prompts import long_text
from .quality import Quality, compare_models
from .settings import Setting
from .weights import WeightSetting

# what the quality is measured on: Python's own help, whatever the prompt is
QUALITY_PREFILL = 1024
QUALITY_TOKENS = 128
QUALITY_CHUNK = 16
# characters of text for so many tokens: no tokenizer in use needs more for prose
CHARACTERS_PER_TOKEN = 20


@dataclass(frozen=True)
class Compared:
    """One row of the comparison.

    Attributes
    ----------
    model
        The model, whose weights may be quantized.
    setting
        The cache to decode from.
    weights
        What the quantized weights are called; empty for the model as it is.
    """

    model: PreTrainedModel
    setting: Setting
    weights: str = ""

    @property
    def label(self) -> str:
        """What a table calls it."""
        return " + ".join(filter(None, [self.weights, self.setting.label]))


def load(
    console: Console, name: str, gguf_file: str | None, dtype: str, device: str
) -> tuple[Any, PreTrainedTokenizerBase, str]:
    """The model, its tokenizer and its name; says what takes time."""
    transformers.logging.set_verbosity_error()
    with working(console, f"looking for {name}"):
        source = models.find(name, gguf_file)
    if source.online:
        # with the Hub's own progress bars
        models.download(source)
    with working(console, f"loading {source.name}") as line, _no_other_bars():
        model, tokenizer = models.load(source, dtype, line.say)
        return model.to(device), tokenizer, source.name  # type: ignore[arg-type]


def quantized(
    console: Console, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, weights: WeightSetting
) -> PreTrainedModel:
    """A copy of the model with quantized weights."""
    with working(console, f"quantizing the weights: {weights.label}"), _no_other_bars():
        return quantize_weights(copy.deepcopy(model), weights.config(tokenizer))


@contextlib.contextmanager
def _no_other_bars() -> Any:
    """Bars of other libraries would run into our own line; errors are raised, not printed."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield


def encode(
    tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, text: str | None, tokens: int | None, new_tokens: int
) -> torch.Tensor:
    """``[1, tokens]``: the prompt, cut to ``tokens``.

    Raises
    ------
    ValueError
        Prompt and new tokens are more than the model takes.
    """
    text = long_text() if text is None else text
    if tokens is not None:
        text = text[: tokens * CHARACTERS_PER_TOKEN]
    input_ids: torch.Tensor = tokenizer(text, return_tensors="pt").input_ids[:, :tokens].to(model.device)
    limit = _positions(model)
    if input_ids.shape[1] + new_tokens > limit:
        raise ValueError(
            f"the model takes {limit:,} tokens; the prompt has {input_ids.shape[1]:,}, then {new_tokens:,} follow. "
            f"Fix: --prompt-tokens {max(1, limit - new_tokens)}"
        )
    return input_ids


def _positions(model: PreTrainedModel) -> int:
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 2**31


def generate_all(
    console: Console,
    tokenizer: PreTrainedTokenizerBase,
    input_ids: torch.Tensor,
    rows: Sequence[Compared],
    new_tokens: int,
    show_text: bool,
) -> list[Run]:
    """One run for each row, with its text as it comes."""
    with working(console, "warming up"):
        for row in rows:
            # the first call of each loads code and starts threads
            generate(row.model, tokenizer, input_ids[:, :256], row.setting, new_tokens=2)
    runs = []
    for row in rows:
        if show_text:
            console.rule(f"[bold]{escape(row.label)}[/]", align="left", style="dim")
        with working(console, f"{row.label}: reading {input_ids.shape[1]:,} tokens") as line:
            write = _writer(console, line, show_text, row.label)
            runs.append(generate(row.model, tokenizer, input_ids, row.setting, new_tokens, write))
        if show_text:
            console.print("\n")
    return runs


def _writer(console: Console, line: Working, show_text: bool, label: str) -> Callable[[str], None]:
    def write(text: str) -> None:
        if show_text:
            # the spinner's line makes room for the text
            line.stop()
            console.print(text, end="", markup=False, soft_wrap=True)
        else:
            line.say(f"{label}: generating")

    return write


def qualities(
    console: Console, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Compared]
) -> tuple[list[Quality | None], dict[str, int] | None]:
    """What each row costs in quality, None where it cannot be measured; and what it was measured on.

    The first row is the reference.
    """
    model = rows[0].model
    prefill = min(QUALITY_PREFILL, _positions(model) - QUALITY_TOKENS)
    caches = [row.setting.make(row.model) for row in rows]
    pairs = [(row.model, cache) for row, cache in zip(rows, caches, strict=True) if cache is not None]
    if prefill < 1 or len(pairs) < 2 or caches[0] is None:
        return [None] * len(rows), None
    input_ids = encode(tokenizer, model, None, prefill + QUALITY_TOKENS, 0)
    with working(console, f"quality: decoding {QUALITY_TOKENS} given tokens after {prefill:,}"):
        found = iter(compare_models(input_ids, prefill, pairs, QUALITY_CHUNK))
    what = {"prefill": prefill, "tokens": QUALITY_TOKENS, "chunk": QUALITY_CHUNK}
    return [None, *(None if cache is None else next(found) for cache in caches[1:])], what
