"""Times and bytes of caches in `generate`, measured in turns."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, StaticCache, StoppingCriteria

from hfkv import integration
from hfkv.cache.memory import memory
from hfkv.cli.settings import PLAIN, QUANTIZED, Setting

from .peak import peak

# transformers' cache of a fixed length
STATIC = "static"


@dataclass(frozen=True)
class Load:
    """What is generated: rows of a batch, tokens of each one's prompt, new tokens."""

    batch_size: int
    context: int
    new_tokens: int


@dataclass
class Measured:
    """A cache under a load; one number a round.

    Attributes
    ----------
    first_token
        Seconds from the call to the first new token.
    per_token
        Seconds between two tokens: the median of the run's steps.
    stored_bytes
        What the cache holds at the end.
    peak_bytes
        The most that the process, or the GPU, held above what it did before the call.
    """

    cache: str
    load: Load
    first_token: list[float] = field(default_factory=list)
    per_token: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    stored_bytes: int = 0

    @property
    def tokens_per_second(self) -> list[float]:
        """Of all rows together, after the first token."""
        return [self.load.batch_size / seconds for seconds in self.per_token]


@dataclass
class Bench:
    """Everything that was measured.

    Attributes
    ----------
    skipped
        Caches that could not be run here, each with the reason.
    """

    measured: list[Measured]
    skipped: dict[str, str]
    peak_method: str = ""


class _Clock(StoppingCriteria):
    """Notes when each token is there; stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if input_ids.device.type == "cuda":
            torch.cuda.synchronize(input_ids.device)
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def default_settings(has_kivi: bool) -> list[Setting]:
    """Transformers' own caches, and kivi where it is installed."""
    ours = [Setting("kivi", {"nbits": 4}), Setting("kivi", {"nbits": 2})] if has_kivi else []
    return [PLAIN, Setting(STATIC), Setting(QUANTIZED), *ours]


def unavailable(setting: Setting) -> str | None:
    """Why transformers' quantized cache cannot run here; None where it can, and for other caches."""
    from transformers.utils import is_hqq_available, is_optimum_quanto_available

    if setting.name != QUANTIZED:
        return None
    backend = str(setting.options.get("backend", "quanto")).lower()
    packages = {"quanto": ("optimum-quanto", is_optimum_quanto_available), "hqq": ("hqq", is_hqq_available)}
    if backend in packages and not packages[backend][1]():
        return (
            f"backend {backend!r} needs {packages[backend][0]} (not installed). Fix: pip install {packages[backend][0]}"
        )
    return None


def bench(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    settings: Sequence[Setting],
    loads: Sequence[Load],
    rounds: int = 3,
    step: Callable[[str | None], None] = lambda text: None,
) -> Bench:
    """Measure every cache under every load, in turns: each round runs all of them, each time another one first.

    Parameters
    ----------
    input_ids
        ``[rows, tokens]``: the prompts, at least as many and as long as the largest load asks for.
    step
        Called with what is run next, and with None when a run is done.
    """
    reasons = {setting.label: unavailable(setting) for setting in settings}
    skipped = {label: reason for label, reason in reasons.items() if reason is not None}
    runnable = [setting for setting in settings if setting.label not in skipped]
    result = Bench([], skipped)
    for setting in runnable:
        # the first call of each loads code, starts threads, and may compile
        step(f"{setting.label}: warming up")
        _generate(model, input_ids[:1, :64], setting, new_tokens=3)
    for load in loads:
        found = {setting.label: Measured(setting.label, load) for setting in runnable}
        result.measured += found.values()
        prompts = input_ids[: load.batch_size, : load.context]
        for turn in range(rounds):
            for setting in [*runnable[turn % len(runnable) :], *runnable[: turn % len(runnable)]]:
                step(f"{setting.label}: batch {load.batch_size}, {load.context:,} tokens")
                result.peak_method = _run(model, prompts, setting, found[setting.label])
                step(None)
    return result


def _run(model: PreTrainedModel, prompts: torch.Tensor, setting: Setting, measured: Measured) -> str:
    with peak(prompts.device) as highest:
        begin = time.perf_counter()
        times, output = _generate(model, prompts, setting, measured.load.new_tokens)
    measured.first_token.append(times[0] - begin)
    measured.per_token.append(statistics.median(after - before for before, after in itertools.pairwise(times)))
    measured.peak_bytes.append(highest.bytes)
    measured.stored_bytes = memory(output).stored_bytes
    return highest.method


def _generate(model: Any, prompts: torch.Tensor, setting: Setting, new_tokens: int) -> tuple[list[float], Any]:
    clock = _Clock()
    output = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        return_dict_in_generate=True,
        stopping_criteria=[clock],
        **_cache_arguments(model, setting, prompts.shape[1] + new_tokens),
    )
    return clock.times, output


def _cache_arguments(model: Any, setting: Setting, tokens: int) -> dict[str, Any]:
    """The keywords for `generate`."""
    if setting.name != STATIC:
        return setting.generate_arguments()
    # by its name, transformers makes it as long as the longest that the model has had before
    cache = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=tokens)
    return {integration.cache_argument(model): cache}


def knee(latency: Sequence[float], throughput: Sequence[float]) -> int | None:
    """The index after which more latency buys little throughput: farthest above the line from first to last.

    None where no point lies above that line: each bit of latency buys as much throughput as the one before, or more.

    Satopaa et al., "Finding a 'Kneedle' in a Haystack: Detecting Knee Points in System Behavior", 2011.
    """
    wide, high = latency[-1] - latency[0], throughput[-1] - throughput[0]
    if wide <= 0 or high <= 0:
        # the last is no slower, or brings nothing: the one with the most throughput
        return max(range(len(throughput)), key=lambda index: throughput[index])
    above = [
        (rate - throughput[0]) / high - (delay - latency[0]) / wide
        for delay, rate in zip(latency, throughput, strict=True)
    ]
    best = max(range(len(above)), key=lambda index: above[index])
    return best if above[best] > 0 else None
