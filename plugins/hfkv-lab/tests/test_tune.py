"""`hfkv tune`: the search is the best there is, the measurement is the demo's, the result is what `generate` runs."""

from __future__ import annotations

import itertools
import json
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, GenerationConfig, LlamaConfig
from typer.testing import CliRunner

import hfkv
from hfkv.cli.app import app
from hfkv.cli.quality import compare
from hfkv.cli.settings import Setting, parse_cache
from hfkv.integration import cache_argument
from hfkv.testing.models import load
from hfkv_lab import tune_page
from hfkv_lab.knapsack import Choice, solve
from hfkv_lab.scoring import Score, Scorer
from hfkv_lab.tune import Budget, Tuner
from hfkv_lab.tune_run import within
from hfkv_lab.tune_space import LayerChoice, Shared, Sizes, Space, cache_config
from hfkv_lab.tune_state import State
from hfkv_lab.tune_text import samples

CONFIG = LlamaConfig(
    num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2, head_dim=32, hidden_size=128
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    items=st.lists(
        st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=4), min_size=1, max_size=5
    ),
    budget=st.integers(0, 150),
)
def test_knapsack_is_within_the_budget_and_near_the_best(items, budget):
    choices = [[Choice(None, size, cost) for size, cost in item] for item in items]
    every = [
        (sum(c.size for c in taken), sum(c.cost for c in taken))
        for taken in itertools.product(*choices)
        if sum(c.cost for c in taken) <= budget
    ]
    found = solve(choices, budget)
    if not every:
        assert found is None
        return
    assert sum(choice.cost for choice in found) <= budget
    # between the hull and the best there is room for one item's largest step
    step = max(max(c.size for c in item) - min(c.size for c in item) for item in choices)
    assert sum(choice.size for choice in found) <= min(every)[0] + step


def test_knapsack_with_one_answer_finds_it():
    # the second item is ten times as costly: it keeps its width
    items = [[Choice("2", 2, 1), Choice("8", 8, 0)], [Choice("2", 2, 10), Choice("8", 8, 0)]]
    assert [choice.label for choice in solve(items, 5)] == ["2", "8"]
    assert [choice.label for choice in solve(items, 11)] == ["2", "2"]
    assert [choice.label for choice in solve(items, 0.5)] == ["8", "8"]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_score_is_that_of_decoding_from_the_cache(family):
    # one prefill for all caches is a short cut: the long way gives the same
    model = load(family, "sdpa").model
    ids = torch.randint(5, 60, (2, 60), generator=torch.Generator().manual_seed(0))
    options = {"nbits": 2, "group_size": 8, "residual_length": 8, "sink_length": 2}
    scorer = Scorer(model, ids, 40, chunk=4)
    for changed in (options, {**options, "nbits": 4}):
        found = scorer.score("kivi", changed)
        # 40 tokens: 2 to a block
        assert found.counts == (2,) * 20
        reference = DynamicCache(config=model.config)
        (expected,) = compare(model, ids, 40, reference, [hfkv.make_cache("kivi", model, **changed)], chunk=4)
        assert found.kl == pytest.approx(expected.kl, rel=1e-4, abs=1e-9)
        assert found.top1.value == pytest.approx(expected.top1)
        assert found.interval().low < found.kl < found.interval().high


def test_config_says_what_was_chosen_and_no_more():
    space = Space(parse_cache("kivi"))
    shared = Shared(32, 4, "rtn")
    chosen = dict(enumerate([LayerChoice(8, 4, 32), *[LayerChoice(3, 2, 64)] * 3, LayerChoice(3, 4, 64)]))
    options = cache_config(space, shared, chosen)
    assert options["layers"] == {"0": {"key_nbits": 8, "value_nbits": 4, "group_size": 32}, "4": {"value_nbits": 4}}
    for index, layer in enumerate(hfkv.make_cache("kivi", CONFIG, **options).layers):
        got = layer.options
        assert (*got.widths, got.group_size) == (
            chosen[index].key_nbits, chosen[index].value_nbits, chosen[index].group_size,
        )  # fmt: skip
        assert (got.residual_length, got.sink_length, got.backend) == (32, 4, "rtn")


def test_bytes_are_those_of_the_cache():
    space = Space(parse_cache("kivi"))
    shared = Shared(32, 4, "rtn")
    chosen = dict(enumerate([LayerChoice(8, 4, 32), *[LayerChoice(3, 2, 64)] * 3, LayerChoice(2, 2, 128)]))
    sizes = Sizes(CONFIG, space, 700, 4)
    cache = hfkv.make_cache("kivi", CONFIG, **cache_config(space, shared, chosen))
    for index in range(5):
        states = torch.zeros(1, 2, 700, 32)
        cache.update(states, states.clone(), index)
    assert sizes.total(shared, chosen) == hfkv.memory(cache).stored_bytes
    assert sizes.bits(shared, chosen) == pytest.approx(hfkv.memory(cache).bits_per_element)


class Additive:
    """A measurement that is the sum over layers of what each costs: what the search assumes, and more or less of it."""

    def __init__(self, costs, factor=1.0):
        self.costs, self.factor, self.calls = costs, factor, 0

    def __call__(self, options):
        self.calls += 1
        total = 0.0
        for index, layer in enumerate(hfkv.make_cache("kivi", CONFIG, **options).layers):
            if not hasattr(layer, "options"):
                continue
            key, value = layer.options.widths
            group = (layer.options.group_size / 32) ** 0.5
            total += group * self.costs[index] * (4.0 ** (2 - key) + 0.1 * 4.0 ** (2 - value))
        return self.factor * total


COSTS = (1.0, 0.02, 0.02, 0.02, 0.3)


@pytest.mark.parametrize("factor", [1.0, 1.7])
def test_search_finds_the_best_of_every_setting(factor):
    # whole, everything costs more than the layers one by one: the search has to go on within less
    space = Space(parse_cache("kivi"), group_sizes=(32,), residual_lengths=(32,))
    sizes = Sizes(CONFIG, space, 4096, 2)
    learn, measure, limit = Additive(COSTS), Additive(COSTS, factor), 0.05
    tuner = Tuner(space, sizes, learn, measure)
    tuner.learn()
    assert learn.calls == tuner.measurements
    best = tuner.search(Budget("kl", limit))[0]
    assert best.kl <= limit
    choices = list(space.layer_choices())
    # the best possible: layers cost independently, so a dynamic program over rounded costs bounds it from below
    table = {0: 0}
    for index in range(5):
        grown = {}
        for choice in choices:
            cost = COSTS[index] * (4.0 ** (2 - choice.key_nbits) + 0.1 * 4.0 ** (2 - choice.value_nbits)) * factor
            for spent, size in table.items():
                total = spent + int(cost * 1e5)
                if total <= limit * 1e5:
                    grown[total] = min(grown.get(total, 1 << 62), size + sizes.of(best.shared, choice, index))
        table = grown
    assert sizes.total(best.shared, best.choices) <= 1.03 * min(table.values())
    assert measure(tuner.options(best)) == best.kl


def test_budget_of_bits_is_kept_and_spent():
    space = Space(parse_cache("kivi"))
    sizes = Sizes(CONFIG, space, 4096, 2)
    tuner = Tuner(space, sizes, Additive(COSTS), Additive(COSTS))
    tuner.learn()
    best = tuner.search(Budget("bits", 4.0))[0]
    assert 3.5 < best.bits <= 4.0
    # what is costly is kept
    assert best.choices[0].key_nbits > best.choices[1].key_nbits
    assert tuner.search(Budget("bits", 1.0)) == []
    assert tuner.search(Budget("kl", 1e-9)) == []


def test_difference_on_the_same_tokens_is_surer_than_each_score():
    # a text of easy and of hard blocks, on which one cache is a tenth worse than the other
    draw = random.Random(0)
    hard = [draw.lognormvariate(0, 1) for _ in range(60)]
    one, other = (Score((0,) * 60, tuple(factor * cost for cost in hard), (16,) * 60) for factor in (1.0, 1.1))
    found = other.minus(one)
    assert found.value == pytest.approx(other.kl - one.kl)
    assert found.low > 0
    assert one.interval().high > other.interval().low
    with pytest.raises(ValueError, match="60 and 1 blocks are of different texts"):
        one.minus(Score((0,), (1.0,), (16,)))


def score(kl, spread):
    return Score((0,) * 40, (kl - spread, kl + spread) * 20, (1,) * 40)


def test_confidence_is_that_of_a_one_sided_interval():
    found = score(0.02, 0.01)
    # forty values of deviation 0.01: 5 % of Student's t with 39 degrees of freedom are above 1.685
    assert within(found, 0.95, None) == pytest.approx(0.02 + 1.685 * 0.01 / 39**0.5, rel=0.02)
    assert within(found, 0.5, None) == pytest.approx(0.02, rel=0.01)
    # compared with a cache that is as far off on every token, only the difference counts
    assert within(found, 0.95, score(0.021, 0.01)) == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("limit", "rows", "said"),
    [
        (0.03, [score(0.02, 0.01)], "KL is below 0.03 with its whole interval"),
        (0.01, [score(0.02, 0.01)], "KL is above 0.01 with its whole interval: --budget kl=x is not kept"),
        (0.021, [score(0.02, 0.01)], "is undecided"),
        (None, [score(0.02, 0.01), score(0.021, 0.01)], "KL is below that of other"),
        (None, [score(0.02, 0.01), score(0.019, 0.01)], "KL is above that of other"),
        (None, [score(0.02, 0.01), score(0.02, 0.02)], "is undecided"),
    ],
)
def test_verdict_is_what_the_check_can_tell(limit, rows, said):
    first, *others = rows
    shown = [tune_page.row("tuned", (1, 3.0), first), *(tune_page.row("other", None, one, first) for one in others)]
    tuned = tune_page.Tuned(
        "m", "kivi", {}, "kl=x", "kl", limit, 100, Shared(32, 4, "rtn"), {}, tuple(shown), (), {}, 0
    )
    assert said in tune_page.verdict(tuned)


def test_texts_are_apart_and_each_is_everywhere(tokenizer):
    model = load("llama", "sdpa").model
    # a text in which every place can be told from any other
    content = "".join(chr(97 + number % 26) + f"{number:04}" for number in range(600))
    sizes = {"learn": (2, 20, 4), "search": (4, 40, 10), "check": (4, 40, 10)}
    found = samples(model, tokenizer, content, sizes)
    ids = tokenizer(content, add_special_tokens=False).input_ids
    taken = []
    for name, sample in found.items():
        rows, prefill, decoded = sizes[name]
        assert sample.input_ids.shape == (rows, prefill + decoded)
        starts = []
        for row in sample.input_ids.tolist():
            (start,) = (at for at in range(len(ids)) if ids[at : at + len(row)] == row)
            starts.append(start)
            taken += range(start, start + len(row))
        # about one in each part of the text
        assert all(abs(start / len(ids) - row / rows) < 1 / rows for row, start in enumerate(starts))
    assert len(taken) == len({*taken})
    with pytest.raises(ValueError, match=r"--text has 3,000 tokens, and 3,500 are needed. Fix: a longer text"):
        samples(model, tokenizer, content, {**sizes, "learn": (50, 50, 12)})


def test_measurements_are_kept_and_belong_to_their_run(tmp_path):
    path = tmp_path / "state.json"
    calls = []

    def measure():
        calls.append(1)
        return Score((8, 1), (0.5, 0.1), (8, 8))

    for _ in range(2):
        state = State(path, {"model": "a", "text": "x"})
        assert state.score("search", {"nbits": 2}, measure) == Score((8, 1), (0.5, 0.1), (8, 8))
    assert len(calls) == 1
    assert state.resumed == 1
    with pytest.raises(ValueError, match=r"another run \(model differ\). Fix: pass --fresh"):
        State(path, {"model": "b", "text": "x"})
    path.write_text("{")
    with pytest.raises(ValueError, match="holds no measurements of tune"):
        State(path, {"model": "a"})


def test_technique_or_option_that_cannot_be_tuned_is_refused():
    with pytest.raises(ValueError, match=r"nbits, residual_length is what tune chooses\. Fix: leave it out"):
        Space(Setting("kivi", {"nbits": 2, "residual_length": 4})).check()
    with pytest.raises(ValueError, match="group_size=12 must be a multiple of 8"):
        Space(parse_cache("kivi"), group_sizes=(12,)).check()


@pytest.fixture(scope="module")
def folder(small, tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    small.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def tune(folder, out, *arguments, code=0):
    sizes = (*"--learn-tokens 1 96 16 --search-tokens 2 96 16 --check-tokens 2 160 32 --context 1000".split(),)
    space = ("--group-size", "8", "--group-size", "16", "--residual-length", "16")
    result = CliRunner().invoke(app, ["tune", str(folder), "--out", str(out), *sizes, *space, *arguments])
    assert result.exit_code == code, result.output
    return result


def test_result_is_what_generate_takes_and_reproduces(folder, tmp_path, words):
    text, out, report = tmp_path / "text.txt", tmp_path / "tuned", tmp_path / "tuned.html"
    text.write_text(words)
    budget = ("--budget", "kl=kivi:nbits=3,group_size=8,residual_length=16", "--text", str(text))
    found = json.loads(tune(folder, out, *budget, "--json", "--report", str(report)).stdout)
    tuned, like, *uniform = found["rows"]
    assert report.read_text().count("<svg") == 3
    options = json.loads((out / "cache_config.json").read_text())
    assert options == found["cache_config"]
    # the divergence, measured the long way on the text of the check
    model = AutoModelForCausalLM.from_pretrained(folder)
    sizes = {"learn": (1, 96, 16), "search": (2, 96, 16), "check": (2, 160, 32)}
    ids = samples(model, AutoTokenizer.from_pretrained(folder), words, sizes)["check"].input_ids
    cache = hfkv.make_cache("kivi", model, **options)
    three = hfkv.make_cache("kivi", model, nbits=3, group_size=8, residual_length=16)
    ours, limit = compare(model, ids, 160, DynamicCache(config=model.config), [cache, three])
    assert ours.kl == pytest.approx(tuned["kl"]["value"], rel=1e-3)
    assert ours.kl <= limit.kl
    assert limit.kl == pytest.approx(like["kl"]["value"], rel=1e-3)
    assert like["difference"]["value"] == pytest.approx(limit.kl - ours.kl, rel=1e-2)
    # the cache that it has to be as good as is one of the uniform ones
    assert {**like, "name": ""} == {**uniform[1], "name": ""}
    # no more bytes than that; and the bytes are real
    assert tuned["bytes"] <= like["bytes"]
    filled = hfkv.make_cache("kivi", model, **options)
    model(torch.randint(0, 256, (1, 1000)), **{cache_argument(model): filled})
    assert hfkv.memory(filled).stored_bytes == tuned["bytes"]
    # as an argument, and as a generation_config.json
    given = GenerationConfig.from_pretrained(out)
    arguments = {"max_new_tokens": 4, "return_dict_in_generate": True, "do_sample": False}
    first = model.generate(ids, cache_implementation="kivi", cache_config=options, **arguments)
    second = model.generate(ids, generation_config=given, **arguments)
    assert torch.equal(first.sequences, second.sequences)
    for output in (first, second):
        kept = output.get("cache", output.get("past_key_values"))
        assert [layer.options for layer in kept.layers] == [layer.options for layer in cache.layers]
    assert parse_cache(str(out / "generation_config.json")) == Setting("kivi", options, "tuned")
    # a second run measures nothing anew
    again = tune(folder, out, *budget).output
    assert "taken over from an earlier run" in again
    assert json.loads((out / "cache_config.json").read_text()) == options


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--budget", "speed=3"), "is not of the form kl=0.01, kl=CACHE or bits=3.5"),
        (("--budget", "kl=0.1", "--target", "kl"), "Fix: --target bits"),
        (("--budget", "kl=0"), "must be above zero"),
        (("--budget", "bits=few"), "'few' is not a number"),
        (("--budget", "kl=kivi:nbit=3"), "Did you mean 'nbits'"),
        (("--budget", "kl=quantized"), "no plugin provides 'quantized'"),
    ],
)
def test_command_names_the_option_and_the_fix(folder, tmp_path, arguments, message):
    result = CliRunner().invoke(app, ["tune", str(folder), "--out", str(tmp_path / "x"), *arguments])
    assert result.exit_code != 0
    assert message in " ".join(result.output.replace("│", " ").split())


def test_budget_that_nothing_holds_says_what_is_possible(folder, tmp_path, words):
    text = tmp_path / "text.txt"
    text.write_text(words)
    shown = tune(folder, tmp_path / "x", "--budget", "kl=1e-12", "--text", str(text), code=1).output
    assert "8 bits everywhere have" in " ".join(shown.split())
