"""Static against continuous batching, by simulation.

Yu et al., "Orca: A Distributed Serving System for Transformer-Based Generative Models", 2022: a static batch ends with
its longest answer, a continuous one hands each slot on as soon as it is free.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# seconds of one step, by rows that decode and by the mean tokens that each holds
StepTime = Callable[[int, float], float]


@dataclass(frozen=True)
class Batching:
    """How a run went.

    Attributes
    ----------
    seconds
        Until the last answer is done; prompts are not counted.
    tokens_per_second
        Of all answers.
    mean_latency
        Seconds from the start to an answer's end, on average; all requests are there at the start.
    utilization
        Share of slots that decode a token that is wanted, over all steps.
    """

    seconds: float
    tokens_per_second: float
    mean_latency: float
    utilization: float


def lengths(count: int, mean: float, spread: float, seed: int = 0) -> list[int]:
    """Lengths of answers: log-normal with that mean, and ``spread`` as the deviation of the logarithm."""
    generator = random.Random(seed)
    middle = math.log(mean) - spread**2 / 2
    return [max(1, round(math.exp(generator.gauss(middle, spread)))) for _ in range(count)]


def static(answers: Sequence[int], slots: int, prompt: int, step_time: StepTime) -> Batching:
    """Batches of ``slots`` requests in order; each runs, at its full width, until its longest answer is done."""
    now, latency, steps = 0.0, 0.0, 0
    for begin in range(0, len(answers), slots):
        batch = answers[begin : begin + slots]
        for step in range(max(batch)):
            # an answer that is done still has its row, filled with padding
            now += step_time(len(batch), prompt + step)
            latency += now * sum(length == step + 1 for length in batch)
        steps += max(batch) * slots
    return _result(answers, now, latency, steps)


def continuous(answers: Sequence[int], slots: int, prompt: int, step_time: StepTime) -> Batching:
    """A free slot takes the next request at once."""
    waiting = list(reversed(answers))
    active: list[list[int]] = []
    now, latency, steps = 0.0, 0.0, 0
    while waiting or active:
        while waiting and len(active) < slots:
            active.append([waiting.pop(), 0])
        now += step_time(len(active), prompt + sum(done for _, done in active) / len(active))
        steps += slots
        for answer in active:
            answer[1] += 1
        latency += now * sum(length == done for length, done in active)
        active = [answer for answer in active if answer[1] < answer[0]]
    return _result(answers, now, latency, steps)


def _result(answers: Sequence[int], seconds: float, latency: float, steps: int) -> Batching:
    tokens = sum(answers)
    return Batching(seconds, tokens / seconds, latency / len(answers), tokens / steps)
