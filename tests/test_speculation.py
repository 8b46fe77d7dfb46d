"""`hfkv.assistant`, the loop behind it, and the default assistant of a model."""

from __future__ import annotations

import gc
import json
import weakref

import pytest
import torch
import transformers
from transformers import TextIteratorStreamer

import hfkv
from hfkv.speculation import Draft, Drafter, Stats
from hfkv.speculation.sampling import Noise, accept_sampled
from hfkv.testing.models import NEW_TOKENS


class OracleDrafter(Drafter):
    """Knows the texts, and errs at every seventh place."""

    texts: torch.Tensor | None = None

    def propose(self, block):
        lengths = []
        for row, known in enumerate(block.known):
            stop = min(known + block.room(row), self.texts.shape[1])
            block.ids[row, known:stop] = self.texts[row, known:stop]
            wrong = [place for place in range(known, stop) if (place + row) % 7 == 0]
            block.ids[row, wrong] = 3
            lengths.append(max(0, stop - known))
        return Draft(lengths)


class Plugin:
    @hfkv.hookimpl
    def hfkv_assistants(self):
        yield hfkv.AssistantSpec(name="oracle", summary="knows the text", load=f"{__name__}:OracleDrafter")


@pytest.fixture
def oracle(register, monkeypatch):
    register(Plugin(), "oracle")

    def give(model, texts, **options):
        monkeypatch.setattr(OracleDrafter, "texts", texts)
        return hfkv.assistant("oracle", model, num_assistant_tokens_schedule="constant", **options)

    return give


def test_batch_takes_no_more_forwards_than_its_slowest_row_and_some(tiny, oracle):
    model = tiny("llama")
    ids = model.prompt(rows=4)
    texts = model.generate(ids, max_new_tokens=64).sequences
    together = hfkv.stats(model.generate(ids, max_new_tokens=64, **oracle(model.model, texts)))
    alone = []
    for row in range(4):
        assisted = oracle(model.model, texts[row : row + 1])
        alone.append(hfkv.stats(model.generate(ids[row : row + 1], max_new_tokens=64, **assisted)).verifications)
    assert max(alone) <= together.verifications <= max(alone) + 4
    # without a known token given again, every rejection of any row would cost all rows
    assert together.verifications < 4 * min(alone) / 2


def test_counts_are_those_of_the_drafts(tiny, oracle):
    model = tiny("llama")
    ids = model.prompt()
    texts = model.generate(ids, max_new_tokens=64).sequences
    output = model.generate(ids, max_new_tokens=64, **oracle(model.model, texts, num_assistant_tokens=4))
    stats = hfkv.stats(output)
    # token 24 comes with the prompt; wrong drafts are at multiples of seven
    place, rounds, accepted, examined, drafted = 25, 0, 0, 0, 0
    while place < 88:
        count = min(4, 88 - place - 1) if place < 87 else 0
        kept = next((n for n in range(count) if (place + n) % 7 == 0 and texts[0, place + n] != 3), count)
        rounds, accepted, examined, drafted = (
            rounds + 1, accepted + kept, examined + min(kept + 1, count), drafted + count,
        )  # fmt: skip
        place += kept + 1
    assert (stats.verifications, stats.accepted, stats.examined, stats.drafted) == (rounds, accepted, examined, drafted)
    assert stats.tokens == 63
    assert stats.tokens_per_verification == 63 / rounds


def test_interval_of_the_acceptance_covers_it():
    def stats(accepted, examined):
        return Stats("x", 1, 1, 0, examined, examined, accepted, 0, 1.0, 0.5, None, None)

    # Wilson's interval for 8 of 10 (Agresti and Coull, 1998)
    low, high = stats(8, 10).acceptance_interval
    assert (round(low, 3), round(high, 3)) == (0.490, 0.943)
    assert stats(0, 0).acceptance_interval is None
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for _ in range(500):
        accepted = int(torch.rand(200, generator=generator).lt(0.9).sum())
        low, high = stats(accepted, 200).acceptance_interval
        covered += low <= 0.9 <= high
    assert 0.92 <= covered / 500 <= 0.98


def test_statistics_of_something_else(tiny):
    model = tiny("llama")
    output = model.generate(model.prompt())
    with pytest.raises(ValueError, match=r"no statistics on this GenerateDecoderOnlyOutput: pass what generate"):
        hfkv.stats(output)


def test_streamer_and_stop_strings_reach_the_loop(model_folder, oracle):
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    inputs = tokenizer("a text", return_tensors="pt")
    # the first 94 of the tokens are those of printable ASCII: a text that can be searched
    plain = {"max_new_tokens": 24, "do_sample": False, "suppress_tokens": list(range(94, 257))}
    free = model.generate(**inputs, **plain)
    # two bytes of the text, which stop it inside a block of drafts
    stop = tokenizer.decode(free[0, 18:20])
    asked = {**plain, "stop_strings": [stop], "tokenizer": tokenizer}
    expected = model.generate(**inputs, **asked)
    assert 6 < expected.shape[1] < free.shape[1]
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    actual = model.generate(**inputs, **asked, streamer=streamer, **oracle(model, free, num_assistant_tokens=7))
    assert actual.tolist() == expected.tolist()
    assert "".join(streamer) == tokenizer.decode(expected[0, 6:])


@pytest.mark.parametrize("nbits", [2, 8])
def test_packed_cache_is_what_it_is_without_an_assistant(tiny, oracle, nbits):
    # not the kit's model, which makes float noise loud
    model = transformers.LlamaForCausalLM(tiny("llama").model.config).eval()
    arguments = {
        "max_new_tokens": 80,
        "do_sample": False,
        "return_dict_in_generate": True,
        "cache_implementation": "kivi",
        "cache_config": {"nbits": nbits, "group_size": 8, "residual_length": 8, "sink_length": 2},
    }
    ids = tiny("llama").prompt(rows=2)
    plain = model.generate(ids, **arguments)
    assisted = model.generate(ids, **arguments, **oracle(model, plain.sequences))
    assert assisted.sequences.tolist() == plain.sequences.tolist()
    assert hfkv.stats(assisted).accepted > 50
    caches = (tiny("llama").cache_of(output) for output in (assisted, plain))
    for one, other in zip(*(cache.layers for cache in caches), strict=True):
        assert one.get_seq_length() == other.get_seq_length()
        assert one._packed[0].count == other._packed[0].count > 8
        for ours, theirs in zip(one.dense(), other.dense(), strict=True):
            # a block that is packed one token sooner or later changes all that follows by 0.01 and more
            assert float((ours - theirs).abs().mean()) < 1e-4


def test_packing_waits_for_the_crop_or_the_next_forward():
    config = transformers.LlamaConfig(num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=16)
    cache = hfkv.make_cache("kivi", config, nbits=4, group_size=8, residual_length=8, sink_length=2)
    (layer,) = cache.layers
    states = torch.randn(1, 1, 64, 16)

    def give(start, stop):
        cache.update(states[:, :, start:stop], states[:, :, start:stop], 0)
        return hfkv.memory(cache).packed_bytes

    packed = give(0, 17)
    assert packed == 0
    assert layer.steps_ahead() == 1
    cache.activate_past_recording()
    assert give(17, 20) == 0, "three tokens that may yet be rejected"
    cache.crop(-3)
    assert hfkv.memory(cache).packed_bytes == 0
    assert give(17, 18) == 0
    cache.crop(0)
    packed = hfkv.memory(cache).packed_bytes
    assert packed > 0
    assert layer.steps_ahead() == 8
    # a loop that never crops packs all the same, one forward later
    for place in range(18, 50):
        give(place, place + 1)
    assert hfkv.memory(cache).packed_bytes >= 4 * packed
    torch.testing.assert_close(cache.layers[0].dense()[0][:, :, -8:], states[:, :, 42:50])


def test_noise_of_a_column_depends_on_seed_and_column_alone():
    scores = torch.zeros(3, 50)
    torch.manual_seed(4)
    one = Noise(torch.device("cpu"))
    torch.manual_seed(4)
    other = Noise(torch.device("cpu"))
    first = one.perturb(scores, 7)
    other.perturb(scores, 2)
    assert torch.equal(other.perturb(scores, 7), first)
    assert not torch.equal(one.perturb(scores, 8), first)
    one.forget(8)
    assert torch.equal(one.perturb(scores, 7), first)


def test_coupled_choices_agree_as_often_as_is_proved():
    torch.manual_seed(0)
    p, q = (torch.randn(2, 20) * 1.5).softmax(dim=-1)
    noise = Noise(torch.device("cpu"))
    rows = 20_000
    chosen, drafted = (noise.perturb(x.log().expand(rows, -1), 0).argmax(dim=-1) for x in (p, q))
    distance = float((p - q).abs().sum() / 2)
    assert float((chosen == drafted).float().mean()) >= (1 - distance) / (1 + distance) - 0.01
    # and are draws from the distribution
    counted = chosen.bincount(minlength=20) / rows
    assert float((counted - p).abs().sum() / 2) < 0.02


def test_rejection_accepts_one_minus_the_distance_and_keeps_the_distribution():
    torch.manual_seed(0)
    p, q = (torch.randn(2, 10) * 1.5).softmax(dim=-1)
    rows = 40_000
    drafts = q.expand(rows, -1).multinomial(1)
    scores = p.log().expand(rows, 2, -1)
    known, limit = torch.zeros(rows, dtype=torch.long), torch.ones(rows, dtype=torch.long)
    standing, final = accept_sampled(drafts, scores, q.expand(rows, 1, -1), known, limit)
    distance = float((p - q).abs().sum() / 2)
    assert float(standing.float().mean()) == pytest.approx(1 - distance, abs=0.01)
    first = torch.where(standing > 0, drafts[:, 0], final)
    counted = first.bincount(minlength=10) / rows
    assert float((counted - p).abs().sum() / 2) < 0.01


def test_default_assistant(tiny, tmp_path):
    tiny_model = tiny("llama")
    model, ids = tiny_model.model, tiny_model.prompt(length=6).repeat(1, 4)
    hfkv.set_default(model, "kivi", nbits=8)
    hfkv.set_default(model, "lookup", min_match=1)
    hfkv.set_default(model, "kivi", nbits=4)
    assert model.generation_config.hfkv == {
        "cache": "kivi", "nbits": 4, "assistant": {"name": "lookup", "min_match": 1},
    }  # fmt: skip
    for arguments in ({}, {"do_sample": True}):
        output = tiny_model.generate(ids, **arguments)
        assert hfkv.stats(output).assistant == "lookup"
        assert tiny_model.cache_of(output).name == "kivi"
    model.generation_config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text())["hfkv"]["assistant"]["name"] == "lookup"
    passed = transformers.GenerationConfig.from_pretrained(tmp_path, max_new_tokens=4, do_sample=False)
    hfkv.set_default(model, None)
    assert hfkv.stats(model.generate(ids, generation_config=passed)).assistant == "lookup"
    with pytest.raises(ValueError, match="no statistics"):
        hfkv.stats(tiny_model.generate(ids))


def test_default_assistant_leaves_other_ways_to_decode_alone(tiny):
    tiny_model = tiny("llama")
    hfkv.set_default(tiny_model.model, "lookup")
    ids = tiny_model.prompt()
    for arguments in ({"num_beams": 2}, {"use_cache": False}, {"assistant_model": tiny_model.assistant}):
        output = tiny_model.generate(ids, **arguments)
        assert output.sequences.shape[1] == ids.shape[1] + NEW_TOKENS
        with pytest.raises(ValueError, match="no statistics"):
            hfkv.stats(output)


def test_default_whose_options_cannot_be_saved(tiny):
    model = tiny("llama")
    with pytest.raises(
        ValueError, match=r"options of 'model' are saved with the model.* pass hfkv\.assistant\('model'"
    ):
        hfkv.set_default(model.model, "model", assistant_model=model.assistant)
    with pytest.raises(ValueError, match="Did you mean 'min_match'"):
        hfkv.set_default(model.model, "lookup", minmatch=2)


def test_assistant_does_not_keep_its_model_alive(tiny):
    config = tiny("llama").model.config
    model = transformers.LlamaForCausalLM(config)
    assisted = hfkv.assistant("lookup", model)
    hfkv.set_default(model, "lookup")
    model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=3, **assisted)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    other = transformers.LlamaForCausalLM(config)
    with pytest.raises(ValueError, match=r"made for another model than this LlamaForCausalLM\. Fix: hfkv\.assistant"):
        other.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=3, **assisted)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_beams": 2}, ValueError, "num_beams=2 asks for another way to decode than the assistant 'lookup'"),
        ({"prompt_lookup_num_tokens": 2}, ValueError, "prompt_lookup_num_tokens=2 asks for another way"),
        ({"use_cache": False}, ValueError, "'lookup' needs a cache: use_cache must not be False"),
        ({"output_attentions": True}, NotImplementedError, "output_attentions=True is not supported"),
        ({"synced_gpus": True}, NotImplementedError, "synced_gpus=True needs as many forwards"),
        ({"cache_implementation": "quantized"}, (NotImplementedError, ImportError), "cannot crop|quanto"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_combined_is_refused(tiny, arguments, error, message):
    model = tiny("llama")
    with pytest.raises(error, match=message):
        model.generate(model.prompt(), **hfkv.assistant("lookup", model.model), **arguments)


def test_assistant_model_beside_an_assistant_is_refused(tiny):
    model = tiny("llama")
    with pytest.raises(ValueError, match=r"assistant_model beside hfkv\.assistant"):
        model.generate(model.prompt(), assistant_model=model.assistant, **hfkv.assistant("lookup", model.model))


def test_unknown_assistant_and_options(tiny):
    model = tiny("llama").model
    with pytest.raises(ValueError, match=r"assistant='lokup' is not known\. Choose from: .*Did you mean 'lookup'"):
        hfkv.assistant("lokup", model)
    with pytest.raises(ValueError, match="num_assistant_tokens_schedule='heuristic' is not supported"):
        hfkv.assistant("lookup", model, num_assistant_tokens_schedule="heuristic")
    with pytest.raises(ValueError, match="num_assistant_tokens=0 must be an integer of at least 1"):
        hfkv.assistant("lookup", model, num_assistant_tokens=0)


def test_without_activation_an_assistant_says_what_would_be_lost(tiny):
    model = tiny("llama").model
    hfkv.deactivate()
    try:
        with pytest.raises(RuntimeError, match=r"drops `streamer` and `tokenizer`.* Fix: hfkv\.activate\(\)"):
            hfkv.assistant("lookup", model)
    finally:
        hfkv.activate()
