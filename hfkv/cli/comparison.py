"""Caches side by side: the same model, the same prompt, the same number of new tokens."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.markup import escape
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from . import models
from .console import Working, working
from .measure import Run, generate
from .prompts import long_text
from .quality import Quality, compare
from .settings import PLAIN, Setting

# what the quality is measured on: Python's own help, whatever the prompt is
QUALITY_PREFILL = 1024
QUALITY_TOKENS = 128
QUALITY_CHUNK = 16
# characters of text for so many tokens: no tokenizer in use needs more for prose
CHARACTERS_PER_TOKEN = 20


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
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    input_ids: torch.Tensor,
    settings: Sequence[Setting],
    new_tokens: int,
    show_text: bool,
) -> list[Run]:
    """One run for each cache, with its text as it comes."""
    with working(console, "warming up"):
        for setting in settings:
            # the first call of each loads code and starts threads
            generate(model, tokenizer, input_ids[:, :256], setting, new_tokens=2)
    runs = []
    for setting in settings:
        if show_text:
            console.rule(f"[bold]{escape(setting.label)}[/]", align="left", style="dim")
        with working(console, f"{setting.label}: reading {input_ids.shape[1]:,} tokens") as line:
            write = _writer(console, line, show_text, setting)
            runs.append(generate(model, tokenizer, input_ids, setting, new_tokens, write))
        if show_text:
            console.print("\n")
    return runs


def _writer(console: Console, line: Working, show_text: bool, setting: Setting) -> Callable[[str], None]:
    def write(text: str) -> None:
        if show_text:
            # the spinner's line makes room for the text
            line.stop()
            console.print(text, end="", markup=False, soft_wrap=True)
        else:
            line.say(f"{setting.label}: generating")

    return write


def qualities(
    console: Console, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: Sequence[Setting]
) -> tuple[list[Quality | None], dict[str, int] | None]:
    """What each cache costs in quality, None where it cannot be measured; and what it was measured on."""
    prefill = min(QUALITY_PREFILL, _positions(model) - QUALITY_TOKENS)
    reference, *caches = [setting.make(model) for setting in (PLAIN, *settings)]
    measured = [cache for cache in caches if cache is not None]
    if prefill < 1 or not measured or reference is None:
        return [None] * len(settings), None
    input_ids = encode(tokenizer, model, None, prefill + QUALITY_TOKENS, 0)
    with working(console, f"quality: decoding {QUALITY_TOKENS} given tokens after {prefill:,}"):
        found = iter(compare(model, input_ids, prefill, reference, measured, QUALITY_CHUNK))
    what = {"prefill": prefill, "tokens": QUALITY_TOKENS, "chunk": QUALITY_CHUNK}
    return [None if cache is None else next(found) for cache in caches], what
