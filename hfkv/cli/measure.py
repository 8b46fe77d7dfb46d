"""One `generate` call with its text, its timings and the bytes of its cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, PreTrainedTokenizerBase, TextStreamer

from ..cache.memory import MemoryReport, memory
from ..cache.segmented import SegmentedLayer
from ..kernels import Request, select
from .settings import Setting


@dataclass(frozen=True)
class Run:
    """What one call took and left behind.

    Attributes
    ----------
    seconds_to_first_token
        From the call to the first new token: building the cache, the prefill, the first choice.
    tokens_per_second
        Of the tokens after the first; None where there is no second one.
    memory
        What the cache holds at the end.
    kernel
        Which kernel attends over what is packed; None where nothing is.
    text
        The new tokens' text.
    """

    seconds_to_first_token: float
    tokens_per_second: float | None
    memory: MemoryReport
    kernel: str | None
    text: str


class _Watch(TextStreamer):
    """Passes text on as it is decided, and notes when each token arrives."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._write = write
        self.times: list[float] = []
        self.text = ""

    def put(self, value: torch.Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.times.append(time.perf_counter())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text
        if text:
            self._write(text)


def generate(
    # any model with transformers' generate
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    input_ids: torch.Tensor,
    setting: Setting,
    new_tokens: int,
    write: Callable[[str], None] = lambda text: None,
) -> Run:
    """Generate greedily with a cache.

    The end of text is not chosen: every run makes ``new_tokens`` tokens, so that bytes and times can be compared.

    Parameters
    ----------
    input_ids
        ``[1, tokens]``.
    write
        Called with each piece of text as soon as it is decided.
    """
    watch = _Watch(tokenizer, write)
    start = time.perf_counter()
    output = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        do_sample=False,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        return_dict_in_generate=True,
        streamer=watch,
        **setting.generate_arguments(),
    )
    first, last = watch.times[0], watch.times[-1]
    return Run(
        first - start,
        (len(watch.times) - 1) / (last - first) if len(watch.times) > 1 else None,
        memory(output),
        _kernel(output.get("cache", output.get("past_key_values"))),
        watch.text,
    )


def _kernel(cache: Cache) -> str | None:
    for layer in cache.layers:
        if isinstance(layer, SegmentedLayer) and "packed" in dict(layer.segments()):
            states = layer.dense()
            assert states is not None
            formats = (layer.key_format(states[0].shape[-1]), layer.value_format(states[1].shape[-1]))
            return select(Request("attend", states[0].device.type, states[0].dtype, formats)).name
    return None
