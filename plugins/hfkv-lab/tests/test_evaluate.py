"""Every metric against the model without a cache, and shown to move when it should."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from transformers import DynamicCache, QuantizedCache

import hfkv
from hfkv.cli.models import load_model
from hfkv.cli.prompts import long_text
from hfkv_lab import facts, needles, refusals, text
from hfkv_lab.candidates import Candidate, common_prefix, copied
from hfkv_lab.decoding import decode
from hfkv_lab.evaluate import EvalOptions, count_steps, evaluate
from hfkv_lab.parts import PARTS
from hfkv_lab.progress import Silent

SMALL = EvalOptions(
    windows=2, prefill=96, tokens=50, chunk=8, new_tokens=10, context=64, needle_lengths=(64, 96), needle_depths=(0.5,)
)


class Forgetful(DynamicCache):
    """Loses the values of what it has read before: attention looks at nothing."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        past = self.get_seq_length(layer_idx)
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return keys, torch.cat([torch.zeros_like(values[:, :, :past]), values[:, :, past:]], dim=2)


def candidates(model, *caches):
    made = {"plain": partial(DynamicCache, config=model.config), "broken": partial(Forgetful, config=model.config)}
    return [Candidate(name, model, made[name]) for name in caches]


class Counting(Silent):
    """Counts the steps."""

    count = 0

    def done(self, count=1):
        self.count += count


@pytest.fixture(scope="module")
def results(small, tokenizer, words):
    steps = Counting()
    compared = candidates(small, "plain", "plain", "broken")
    found = evaluate(compared, tokenizer, words, SMALL, steps)
    assert steps.count == count_steps(SMALL, len(compared))
    return found


def test_plain_against_plain_is_no_difference(results):
    reference, same, _ = results
    assert same.kl.high < 1e-9
    assert (same.top1.value, same.top1.high) == (1, 1)
    assert same.prefixes == [10, 10]
    assert same.perplexity == reference.perplexity
    assert (same.needles, same.facts) == (reference.needles, reference.facts)
    assert same.flips.value == 0
    assert all(layer.output == layer.keys == layer.values == 0 for layer in same.layers)
    assert same.bits_per_element == 32


def test_broken_cache_shows_everywhere(results):
    reference, _, broken = results
    assert broken.kl.low > 0.1
    assert broken.kl.separates(reference.kl)
    assert broken.top1.high < 0.9
    assert max(broken.prefixes) < 10
    assert all(layer.keys == 0 and layer.values > 0.9 and layer.output > 0.3 for layer in broken.layers)
    assert all(layer.from_keys == 0 and layer.from_values == layer.output for layer in broken.layers)


def test_perplexity_is_that_of_the_model_without_a_cache(small, tokenizer, words, results):
    losses = []
    ids = text.encode(tokenizer, words)
    for window in text.windows(ids, 2, 147, text.start(tokenizer)):
        with torch.no_grad():
            predicted = small(window, use_cache=False).logits[0, 96:-1].log_softmax(-1)
        losses.append(-predicted.gather(1, window[0, 97:, None])[:, 0])
    assert results[0].perplexity.value == pytest.approx(float(torch.cat(losses).mean().exp()), rel=1e-4)


def test_divergence_is_that_of_the_two_models(small):
    # two models, so that the divergence is known without a cache
    other = copy.deepcopy(small)
    with torch.no_grad():
        other.lm_head.weight *= 1.2
    window = torch.randint(0, 256, (1, 61), generator=torch.Generator().manual_seed(5))
    pair = [
        Candidate(str(index), model, partial(DynamicCache, config=model.config))
        for index, model in ((0, small), (1, other))
    ]
    caches = [candidate.read(window[:, :20]) for candidate in pair]
    _, found = decode(pair, caches, window, 20, 7)
    with torch.no_grad():
        expected, actual = (
            model(window, use_cache=False).logits[0, 20:-1].double().log_softmax(-1) for model in (small, other)
        )
    kl = torch.nn.functional.kl_div(actual, expected, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(torch.cat(found.kl).double(), kl, rtol=1e-3, atol=1e-5)
    assert torch.cat(found.same).tolist() == (expected.argmax(-1) == actual.argmax(-1)).tolist()
    assert len(torch.cat(found.nll)) == 40


def test_facts_are_scored_as_without_a_cache(small, tokenizer, words):
    context = text.encode(tokenizer, words)[:80]
    shared, asked = facts.questions(tokenizer, context)
    (candidate,) = candidates(small, "plain")
    right = facts.answer(candidate, shared, asked)
    expected = []
    for question in asked:
        scores = []
        for ending in question.endings:
            before = [*shared, *question.beginning]
            with torch.no_grad():
                predicted = small(torch.tensor([before + ending]), use_cache=False).logits[0].log_softmax(-1)
            rows = predicted[len(before) - 1 : -1]
            scores.append(float(rows.gather(1, torch.tensor(ending)[:, None]).mean()))
        expected.append(scores.index(max(scores)) == 0)
    assert right == expected
    assert tokenizer.decode(shared + asked[0].beginning).endswith("\n\nThe capital of France is")


def test_there_are_sixteen_facts_and_four_endings():
    assert len(facts.FACTS) == 16
    assert len({fact.beginning for fact in facts.FACTS}) == 16
    assert all(len(set(fact.endings)) == 4 for fact in facts.FACTS)


def test_needles_lie_where_they_should(tokenizer, words):
    ids = text.encode(tokenizer, words)
    cases = needles.needles(tokenizer, ids, (64, 128), (0.0, 0.5, 1.0), seed=1)
    assert [(case.length, case.depth) for case in cases] == [
        (length, depth) for length in (64, 128) for depth in (0.0, 0.5, 1.0)
    ]
    for case in cases:
        shown = tokenizer.decode(case.haystack)
        needle = len(f"\n\nThe secret number of the  is {case.answer}.\n\n")
        assert shown.index("\n\nThe secret") == pytest.approx(case.depth * case.length, abs=1)
        assert shown.count(case.answer) == 1
        assert len(case.haystack) > case.length + needle
        assert case.answer not in tokenizer.decode(case.question)
    assert len({case.answer for case in cases}) == 6
    assert cases == needles.needles(tokenizer, ids, (64, 128), (0.0, 0.5, 1.0), seed=1)
    assert cases != needles.needles(tokenizer, ids, (64, 128), (0.0, 0.5, 1.0), seed=2)


@pytest.mark.parametrize(
    "answer", ["I'm sorry, but I can\u2019t do that.", "As an AI, I do not know.", "Unfortunately that is not known."]
)
def test_refusals_are_recognized(answer):
    assert refusals.is_refusal(answer)


@pytest.mark.parametrize("answer", ["Use `kill`.\nI can't say more.", "Slowly.", ""])
def test_answers_are_no_refusals(answer):
    assert not refusals.is_refusal(answer)


def test_prompts_share_their_context(tokenizer):
    asked = refusals.prompts(tokenizer, "some context " * 20)
    assert len(asked) == len(refusals.PROMPTS)
    assert common_prefix(asked) >= len("some context " * 20)


def test_common_prefix_leaves_a_token():
    assert common_prefix([[1, 2, 3], [1, 2, 4, 5]]) == 2
    assert common_prefix([[1, 2], [1, 2, 3]]) == 1
    assert common_prefix([[1], [2]]) == 0


@pytest.mark.parametrize("name", ["kivi", "quanto", "hqq"])
def test_copy_of_a_cache_leaves_it_as_it_was(small, name):
    ids = torch.randint(0, 256, (1, 90), generator=torch.Generator().manual_seed(6))
    if name == "kivi":
        make = partial(hfkv.make_cache, "kivi", small, group_size=8, residual_length=8)
    else:
        pytest.importorskip(name if name == "hqq" else "optimum.quanto")
        make = partial(QuantizedCache, backend=name, config=small.config, nbits=4, q_group_size=16, residual_length=16)
    candidate = Candidate(name, small, make)
    cache = candidate.read(ids[:, :70])
    first = candidate.go_on(cache, ids[:, :71], 30)
    assert cache.get_seq_length() == 70
    assert copied(cache).get_seq_length() == 70
    # were the copy's steps written into the cache, the second run would start elsewhere
    assert candidate.go_on(cache, ids[:, :71], 30) == first
    assert candidate.go_on(candidate.read(ids[:, :70]), ids[:, :71], 30) == first


def test_windows_cover_the_text_and_do_not_overlap():
    found = text.windows(list(range(1000)), 4, 101, [7])
    assert [window[0, :2].tolist() for window in found] == [[7, 0], [7, 250], [7, 500], [7, 750]]
    assert all(window.shape == (1, 101) for window in found)
    with pytest.raises(ValueError, match=r"the text has 1,000 tokens, and 11 windows of 101 need 1,100. Fix: a longer"):
        text.windows(list(range(1000)), 11, 101, [7])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parts": ("speed",)}, r"parts=\['speed'\] is not supported. Choose from: decoding"),
        ({"windows": 0}, "windows=0 must be at least 1"),
        ({"needle_depths": (1.5,)}, "must lie between 0 and 1"),
        ({"needle_lengths": ()}, "needle_lengths is empty"),
    ],
)
def test_impossible_options_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        EvalOptions(**change)


def test_more_than_the_model_takes_is_refused(small, tokenizer, words):
    with pytest.raises(ValueError, match=r"more than the 4,096 tokens that the model takes. Fix: --prefill 2048"):
        evaluate(candidates(small, "plain"), tokenizer, words, EvalOptions(prefill=4000, tokens=200))


def test_parts_are_measured_alone(small, tokenizer, words):
    names = {
        "decoding": "kl",
        "prefix": "prefixes",
        "layers": "layers",
        "needles": "needles",
        "facts": "facts",
        "refusals": "flips",
    }
    assert set(names) == set(PARTS)
    for part in ("layers", "prefix"):
        options = EvalOptions(parts=(part,), windows=1, prefill=40, tokens=20, new_tokens=4)
        steps = Counting()
        (found,) = evaluate(candidates(small, "plain"), tokenizer, words, options, steps)
        assert steps.count == count_steps(options, 1)
        assert [name for name in names if getattr(found, names[name]) is not None] == [part]


def test_real_model_reads_its_needles_and_a_broken_cache_does_not():
    model, tokenizer = load_model("smollm2")
    options = EvalOptions(parts=("needles", "facts"), needle_lengths=(256,), needle_depths=(0.2, 0.8), context=64)
    plain, broken = evaluate(candidates(model, "plain", "broken"), tokenizer, long_text(), options)
    assert plain.needles == [True, True]
    assert broken.needles == [False, False]
    assert plain.facts.value > 0.6
    assert broken.facts.separates(plain.facts) or broken.facts.value < plain.facts.value
