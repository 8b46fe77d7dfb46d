"""What copying brings and what it may lose, on recorded answers of SmolLM2 at known costs: no clock takes part.

``traces.json`` is what ``python benchmarks/traces.py`` wrote: prompts that ask to repeat or edit a text and prompts
that do not, each with the greedy answer. Tokens are numbered as they appear; only which of them are equal matters.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from pathlib import Path

import pytest
import torch

from hfkv.speculation import Block, DraftLength
from hfkv_speculative.lookup import LookupDrafter, LookupOptions

TRACES = json.loads(Path(__file__).with_name("traces.json").read_text(encoding="utf-8"))
COPIED, FREE = ([trace for trace in TRACES if trace["copied"] is copied] for copied in (True, False))


def two_cores(drafts):
    """A forward of SmolLM2 in bfloat16 on two cores, in plain ones: 1.10 with one draft, 1.32 with sixteen."""
    return 1.0 if drafts == 0 else 1.09 + 0.0145 * drafts


def cheap_rows(drafts):
    """Where a forward waits for the weights alone."""
    return 1.0 + 0.002 * drafts


def dear_rows(drafts):
    """Where each row takes its time."""
    return 1.0 + 0.15 * drafts


COSTS = [two_cores, cheap_rows, dear_rows]


def alternating():
    """Turns of copied and of new text, sixty tokens each, after both prompts."""
    for copied, free in zip(COPIED, FREE, strict=True):
        # numbers of one trace mean nothing in another
        other = [[token + 10_000 for token in free[part]] for part in ("prompt", "answer")]
        answer = [
            token
            for turn in range(0, 120, 60)
            for text in (copied["answer"], other[1])
            for token in text[turn : turn + 60]
        ]
        yield {"prompt": [*copied["prompt"], *other[0]], "answer": answer}


def speedup(trace, cost, tokens=128, noise=0.0, seed=0, schedule="measured"):
    """How much faster the answer is decoded than by plain forwards.

    The machine takes what ``cost`` says. With noise the controller reads other times: a part longer each, and one in
    eight twice as long.
    """
    chance = random.Random(seed)
    text = [*trace["prompt"], *trace["answer"][:tokens]]
    drafter = LookupDrafter(None, LookupOptions(), [])
    control = DraftLength(drafter.most, schedule)
    # the prompt's forward gives the first token
    first = known = len(trace["prompt"]) + 1
    ids = torch.tensor([text[:known] + [-1] * (len(text) - known + drafter.most)])
    time = 0.0
    while known < len(text):
        length = min(control.choose(drafter.forecast(ids, [known])), len(text) - known - 1)
        drafts = drafter.propose(Block(ids, [known], known - 1, 1 + length, {})).lengths[0] if length else 0
        proposed = ids[0, known : known + drafts].tolist()
        kept = next((n for n, token in enumerate(proposed) if token != text[known + n]), drafts)
        taken = cost(drafts)
        read = taken * math.exp(abs(chance.gauss(0, noise))) * (2 if chance.random() < noise / 4 else 1)
        control.record(1 + drafts, drafts, kept + 1, 0.0, read)
        ids[0, known : known + kept + 1] = torch.tensor(text[known : known + kept + 1])
        known, time = known + kept + 1, time + taken
    return (len(text) - first) / time


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("tokens", [128, 256])
def test_text_that_is_not_copied_is_never_slowed(cost, tokens):
    found = [speedup(trace, cost, tokens) for trace in FREE]
    assert min(found) > 0.97
    assert statistics.median(found) > 1.0


def test_text_that_is_not_copied_is_hardly_slowed_by_what_a_clock_gets_wrong():
    found = [
        speedup(trace, two_cores, noise=noise, seed=seed) for trace in FREE for noise in (0.1, 0.5) for seed in (0, 1)
    ]
    assert min(found) > 0.97


def test_copied_text_is_decoded_in_less_than_half_of_the_time():
    found = [speedup(trace, two_cores) for trace in COPIED]
    # the least is a text that the model does not copy
    assert statistics.median(found) > 2.4
    assert min(found) > 1.2
    noisy = [speedup(trace, two_cores, noise=0.5, seed=seed) for trace in COPIED for seed in (0, 1)]
    assert statistics.median(noisy) > 2.2


@pytest.mark.parametrize("cost", COSTS)
def test_text_that_is_copied_in_turns_gains(cost):
    found = [speedup(trace, cost, tokens=240) for trace in alternating()]
    assert min(found) > 1.0
    assert statistics.median(found) > 1.2


def test_drafting_always_would_slow_new_text():
    # the bounds above can fail
    assert min(speedup(trace, two_cores, schedule="constant") for trace in FREE) < 0.95
