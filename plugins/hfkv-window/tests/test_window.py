"""What a query sees, what is stored, and for how long: both caches on tiny models."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hfkv
from hfkv.integration import cache_argument
from hfkv.testing.models import TinyModel, load, logits_error

SINK = {"window_length": 8, "sink_length": 2}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_pattern_is_sinks_and_the_newest_tokens():
    (layer, *_) = hfkv.make_cache("sink", load("llama", "sdpa").model, window_length=3, sink_length=2).layers
    visible, nearer = layer.attended(8)
    drawn = ["".join(".x"[seen] for seen in row) for row in visible.tolist()]
    assert drawn == [
        "x.......",
        "xx......",
        "xxx.....",
        "xxxx....",
        "xxxxx...",
        "xx.xxx..",
        "xx..xxx.",
        "xx...xxx",
    ]
    assert nearer[:, :2].tolist() == [[0, 0]] * 5 + [[1, 1], [2, 2], [3, 3]]
    assert not nearer[:, 2:].any()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "gemma4", "t5"])
@pytest.mark.parametrize("positions", ["cache", "absolute"])
def test_one_40_token_forward_equals_token_by_token(family, attention, positions):
    if family == "t5" and positions == "cache":
        pytest.skip("no rotary embedding: refused, see test_rotation.py")
    tiny = load(family, attention)
    ids = tiny.prompt(rows=2, length=60)

    def logits(*chunks):
        cache = tiny.wrapped(hfkv.make_cache("sink", tiny.model, **SINK, positions=positions))
        return torch.cat([tiny.feed(cache, ids[:, :end], chunk) for end, chunk in chunks], dim=1)

    expected = logits((60, 1))
    # the 40 tokens on top of nothing, of fewer tokens than the window, and of more
    for chunks in ([(40, None), (60, 1)], [(5, None), (45, None), (60, 1)], [(20, 1), (60, None)]):
        assert float(logits_error(logits(*chunks), expected).max()) < 1e-3


def test_a_chunk_longer_than_what_is_attended_at_once():
    tiny = load("qwen2", "sdpa")
    ids = tiny.prompt(length=700)
    cache = hfkv.make_cache("sink", tiny.model, window_length=100, sink_length=3)
    at_once = tiny.feed(cache, ids)
    cache = hfkv.make_cache("sink", tiny.model, window_length=100, sink_length=3)
    assert float(logits_error(at_once, tiny.feed(cache, ids, chunk=50)).max()) < 1e-3


@pytest.mark.parametrize(("name", "options"), [("sink", SINK), ("window", {"window_length": 8})])
def test_bytes_are_flat_and_bounded(name, options):
    """Sinks, window and the room for an eighth of it: nothing else is stored, however many tokens were seen."""
    tiny = load("llama", "sdpa")
    cache = hfkv.make_cache(name, tiny.model, **options)
    kept = 8 + options.get("sink_length", 0)
    # 2 KV heads of 16 channels, keys and values, float32
    token = 2 * 16 * 2 * 4
    for length in (kept, 30, 200, 1000):
        tiny.feed(cache, tiny.prompt(length=length), chunk=97)
        report = hfkv.memory(cache)
        for layer in report.layers:
            assert (layer.seen, layer.tokens, layer.elements * 4) == (length, kept, kept * token)
            assert layer.stored_bytes == (kept + 8 // 8) * token
        assert report.stored_bytes == 3 * (kept + 1) * token


def test_a_long_prompt_is_freed_at_once():
    tiny = load("llama", "sdpa")
    cache = hfkv.make_cache("sink", tiny.model, **SINK)
    tiny.feed(cache, tiny.prompt(length=500))
    assert hfkv.memory(cache).stored_bytes == 3 * 11 * 256


def test_after_100_000_tokens_bytes_are_the_same_and_the_next_token_is_that_of_the_kept_ones():
    """Of one layer, whose states remember nothing: the model itself, on the kept tokens alone, counted from zero."""
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        initializer_range=0.1, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
    ids = torch.randint(1, 96, (1, 100_000), generator=torch.Generator().manual_seed(0))
    cache = hfkv.make_cache("sink", model, window_length=60, sink_length=4)
    stored = set()
    with torch.no_grad():
        for part in (*ids[:, :-40].split(2000, dim=1), *ids[:, -40:].split(1, dim=1)):
            last = model(part, logits_to_keep=1, **{cache_argument(model): cache}).logits
            stored.add(hfkv.memory(cache).stored_bytes)
        kept = torch.cat([ids[:, :4], ids[:, -60:]], dim=1)
        expected = model(kept, use_cache=False, logits_to_keep=1).logits
        without = model(ids[:, -64:], use_cache=False, logits_to_keep=1).logits
    # the sinks, the window and the room for an eighth of it
    assert stored == {(4 + 60 + 60 // 8) * 2 * 32 * 4}
    # angles of positions of five digits, in float32
    assert float(logits_error(last, expected).max()) < 0.01
    assert float(logits_error(without, expected).max()) > 0.05


def test_an_append_costs_the_same_however_much_came_before():
    """What was handed to attention stays in place, and so do the buffers, but for one move in ``window_length / 8``."""
    tiny = load("llama", "sdpa")
    cache = hfkv.make_cache("sink", tiny.model, window_length=64, sink_length=4)
    tiny.feed(cache, tiny.prompt(length=300))
    (layer, *_) = cache.layers
    moves, before = 0, None
    for length in range(301, 301 + 64):
        tiny.feed(cache, tiny.prompt(length=length))
        address = layer._exact.keys.data_ptr()
        moves, before = moves + (address != before), address
    assert moves == 64 // 8 + 1


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("chunk", [None, 1, 5])
def test_left_padded_rows_are_what_they_are_alone(attention, chunk):
    """Padding from none to more than a window, the sinks of some rows in a later chunk than those of others."""
    tiny = load("llama", attention)
    lengths = (40, 33, 21, 4)
    ids = tiny.prompt(rows=4, length=40)
    for row, length in enumerate(lengths):
        ids[row, : 40 - length] = 0
    longer = torch.cat([ids, tiny.prompt(rows=4, length=20, seed=3)], dim=1)
    cache = hfkv.make_cache("sink", tiny.model, window_length=6, sink_length=3)
    actual = torch.cat([tiny.feed(cache, ids, chunk), tiny.feed(cache, longer, 1)], dim=1)
    for row, length in enumerate(lengths):
        alone = longer[row : row + 1, 40 - length :]
        solo = hfkv.make_cache("sink", tiny.model, window_length=6, sink_length=3)
        expected = tiny.feed(solo, alone, chunk=1)
        assert float(logits_error(actual[row : row + 1, 40 - length :], expected).max()) < 1e-3, row


def test_padding_between_two_turns_is_not_counted_in_the_distance():
    """A row that ended early is padded where the other goes on; its sinks move by real tokens alone.

    One layer: until the window is past the padding it counts slots, as transformers' own windows do, and in deeper
    layers that shows for longer.
    """
    model = copy.deepcopy(load("llama", "sdpa").model)
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:1], 1
    tiny = TinyModel("llama", model)
    options = {"window_length": 12, "sink_length": 2}
    first = tiny.prompt(rows=2, length=20)
    first[1, 9:11] = 0
    ids = torch.cat([first, tiny.prompt(rows=2, length=14, seed=2)], dim=1)
    actual = tiny.feed(hfkv.make_cache("sink", tiny.model, **options), ids, chunk=1)
    alone = torch.cat([ids[1:, :9], ids[1:, 11:]], dim=1)
    expected = tiny.feed(hfkv.make_cache("sink", tiny.model, **options), alone, chunk=1)
    assert float(logits_error(actual[1:, 23:], expected[:, 21:]).max()) < 1e-3


def test_layers_of_different_windows_share_one_mask():
    """Full attention in one layer, a long and a short window in others, beside padding."""
    tiny = load("llama", "sdpa")
    ids = tiny.prompt(rows=2, length=50)
    ids[1, :7] = 0
    windows = {"0": {"window_length": 20}, "1": "dynamic"}
    for layers, attention in itertools.product([windows, {"0": windows["0"]}], ["sdpa", "eager"]):
        tiny = load("llama", attention)
        caches = [hfkv.make_cache("sink", tiny.model, **SINK, layers=layers) for _ in range(3)]
        expected = tiny.feed(caches[0], ids, chunk=1)
        for cache, chunk in zip(caches[1:], (9, None), strict=True):
            assert float(logits_error(tiny.feed(cache, ids, chunk), expected)[:, 7:].max()) < 1e-3
        alone = tiny.feed(hfkv.make_cache("sink", tiny.model, **SINK, layers=layers), ids[1:, 7:])
        assert float(logits_error(expected[1:, 7:], alone).max()) < 1e-3
        tokens = [layer.tokens for layer in hfkv.memory(caches[0]).layers]
        assert tokens == [22, 50 if "1" in layers else 10, 10]


def test_crop_deeper_than_what_is_kept_names_the_fix():
    tiny = load("llama", "sdpa")
    cache = hfkv.make_cache("sink", tiny.model, **SINK)
    tiny.feed(cache, tiny.prompt(length=40))
    with pytest.raises(ValueError, match=r"'sink' has freed .*activate_past_recording\(\)"):
        cache.crop(-6)


def test_what_is_recorded_for_a_crop_is_bounded_and_freed_after_it():
    tiny = load("llama", "sdpa")
    cache = hfkv.make_cache("sink", tiny.model, **SINK)
    cache.activate_past_recording()
    ids = tiny.prompt(length=600)
    tiny.feed(cache, ids[:, :300])
    cache.crop(0)
    bound = hfkv.memory(cache).stored_bytes
    tiny.feed(cache, ids, chunk=20)
    assert hfkv.memory(cache).stored_bytes <= bound + 3 * 20 * 256
    cache.crop(-200)
    actual = tiny.feed(cache, torch.cat([ids[:, :400], ids[:, :9]], dim=1))
    fresh = hfkv.make_cache("sink", tiny.model, **SINK)
    tiny.feed(fresh, ids[:, :400])
    expected = tiny.feed(fresh, torch.cat([ids[:, :400], ids[:, :9]], dim=1))
    assert float(logits_error(actual, expected).max()) < 1e-3


def test_prompt_lookup_across_the_edge_of_the_window():
    tiny = load("llama", "sdpa")
    ids = tiny.prompt(length=5).repeat(1, 3)
    asked = {"cache_implementation": "sink", "cache_config": {"window_length": 14, "sink_length": 2}}
    plain = tiny.generate(ids, **asked)
    lookup = tiny.generate(ids, **asked, prompt_lookup_num_tokens=6)
    assert lookup.sequences.tolist() == plain.sequences.tolist()


def test_gradients_flow_through_the_current_tokens():
    tiny = load("qwen2", "sdpa")
    ids = tiny.prompt(length=40)
    cache = hfkv.make_cache("sink", tiny.model, **SINK)
    logits = tiny.model(ids, **{tiny.cache_argument: cache}).logits
    logits.square().mean().backward()
    gradient = tiny.model.model.layers[0].self_attn.k_proj.weight.grad
    tiny.model.zero_grad()
    assert gradient is not None
    assert float(gradient.abs().max()) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window_length": 0}, r"window_length=0 must be an integer of at least 1"),
        ({"sink_length": -1}, r"sink_length=-1 must be an integer of at least 0"),
        ({"positions": "relative"}, r"positions='relative' is not supported. Choose from: 'cache', 'absolute'"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        hfkv.make_cache("sink", load("llama", "sdpa").model, **options)


def test_windows_need_hfkv_to_be_active():
    model = load("llama", "sdpa").model
    hfkv.deactivate()
    try:
        with pytest.raises(NotImplementedError, match=r"Fix: hfkv.activate\(\)"):
            hfkv.make_cache("window", model)
    finally:
        hfkv.activate()
