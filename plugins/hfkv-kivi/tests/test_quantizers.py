"""Every quantizer in the cache, and what users saw with the quantized caches of other libraries."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hfkv
from hfkv import kernels, registry
from hfkv.cache import KVQuantizer, PackedFormat
from hfkv.integration import cache_argument

# every installed quantizer at every width that it declares: a new one is tested by being there
BACKENDS = [
    pytest.param(
        name,
        nbits,
        marks=pytest.mark.skipif(bool(registry.unmet(spec)), reason=f"{name} needs {registry.unmet(spec)}"),
        id=f"{name}-{nbits}",
    )
    for name, spec in registry.manager().specs(hfkv.KVQuantizerSpec).items()
    for nbits in spec.nbits
]
every_backend = pytest.mark.parametrize(("backend", "nbits"), BACKENDS)

HEAD_DIM, GROUP = 32, 32


def states(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def llama(layers=2, **settings):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        pad_token_id=0,
        **settings,
    )
    return LlamaForCausalLM(config).eval()


def prompt(length, seed=0):
    return torch.randint(1, 64, (1, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def forward(model, ids, cache):
    return model(ids, **{cache_argument(model): cache}).logits


@every_backend
def test_cache_goes_on_the_same_after_pickle_and_deepcopy(backend, nbits):
    model, ids = llama(), prompt(60)
    cache = hfkv.make_cache("kivi", model, backend=backend, nbits=nbits, group_size=8, residual_length=8)
    forward(model, ids[:, :50], cache)
    copies = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
    expected = [forward(model, token, cache) for token in ids[:, 50:].split(1, dim=1)]
    assert hfkv.memory(cache).packed_bytes > 0
    for other in copies:
        actual = [forward(model, token, other) for token in ids[:, 50:].split(1, dim=1)]
        assert torch.equal(torch.cat(actual, 1), torch.cat(expected, 1))


@every_backend
def test_generate_stays_near_the_plain_cache(backend, nbits):
    model, ids = llama(), prompt(50)
    options = {"backend": backend, "nbits": nbits, "group_size": 8, "residual_length": 8}
    arguments = {"max_new_tokens": 20, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    output = model.generate(ids, cache_implementation="kivi", cache_config=options, **arguments)
    with torch.no_grad():
        # the same tokens, scored without a cache
        expected = model(output.sequences, use_cache=False).logits[:, 49:-1]
    error = (torch.stack(output.logits, 1) - expected).std() / expected.std()
    assert hfkv.memory(output).packed_bytes > 0
    assert 0 < error < {2: 1, 3: 0.4, 4: 0.2, 8: 0.03}[nbits]


# reports, on the backend of this distribution


def test_one_outlier_key_channel_raises_the_error_of_all_other_channels():
    x = states(1, 2, 4 * GROUP, HEAD_DIM)
    outlier = x.clone()
    outlier[..., 5] *= 100
    others = [channel for channel in range(HEAD_DIM) if channel != 5]

    def error(keys, **options):
        cache = hfkv.make_cache("kivi", llama().config, sink_length=0, residual_length=0, **options)
        cache.update(keys, keys, 0)
        return (cache.layers[0].keys - keys)[..., others].abs().mean()

    assert error(outlier) == error(x)
    # the axis of other libraries' default: the report, and the proof that this test can fail
    assert error(outlier, key_axis="token") > 5 * error(x, key_axis="token")


def test_scale_underflow_turns_a_constant_key_channel_into_nan():
    model, ids = llama(attention_bias=True), prompt(50)
    layer = model.model.layers[0].self_attn
    with torch.no_grad():
        # a pair of channels that rope rotates into each other, and values that are constant or nearly so
        layer.k_proj.weight[[7, 15]] = 0
        layer.v_proj.weight[:4] = 0
        layer.v_proj.weight[4:8] *= 1e-9
        layer.v_proj.bias[:8] = 0.5
    expected = forward(model, ids, None)
    for nbits, tolerance in ((2, None), (3, None), (4, None), (8, 0.03)):
        options = {"nbits": nbits, "group_size": 8, "residual_length": 0, "sink_length": 0, "value_axis": "channel"}
        cache = hfkv.make_cache("kivi", model, **options)
        logits = torch.cat([forward(model, piece, cache) for piece in ids.split([40, *[1] * 10], 1)], 1)
        assert logits.isfinite().all()
        assert tolerance is None or (logits - expected).std() < tolerance * expected.std()


def test_scale_overflow_of_a_bfloat16_model_gives_infinite_logits():
    model = llama(attention_bias=True).to(torch.bfloat16)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.bias[3] = 1e5
        model.model.layers[1].self_attn.v_proj.bias[3] = 1e5
    for nbits in (2, 4):
        cache = hfkv.make_cache("kivi", model, nbits=nbits, group_size=8, residual_length=0, sink_length=0)
        ids = prompt(50)
        logits = [
            forward(model, ids[:, :40], cache),
            *(forward(model, token, cache) for token in ids[:, 40:].split(1, 1)),
        ]
        assert cache.layers[0].keys.abs().max() > 3e4
        assert torch.cat(logits, 1).isfinite().all()
        assert all(layer.keys.isfinite().all() and layer.values.isfinite().all() for layer in cache.layers)


def test_token_that_comes_when_all_others_are_packed_sees_only_itself():
    model, ids = llama(), prompt(50)
    cache = hfkv.make_cache("kivi", model, nbits=8, group_size=8, residual_length=0, sink_length=0)
    logits = torch.cat([forward(model, piece, cache) for piece in ids.split([40, *[1] * 10], 1)], 1)
    expected = forward(model, ids, None)
    assert (logits - expected).std() < 0.03 * expected.std()


def test_batch_neighbour_that_is_20_times_larger_changes_a_row():
    row, large = states(1, 2, 100, HEAD_DIM, seed=1), 20 * states(1, 2, 100, HEAD_DIM, seed=2)
    config = llama().config
    alone, beside = (hfkv.make_cache("kivi", config, nbits=2, group_size=8, residual_length=8) for _ in range(2))
    # a prompt, then tokens one by one: blocks are packed in both
    for piece_row, piece_large in zip(row.split([60, *[1] * 40], 2), large.split([60, *[1] * 40], 2), strict=True):
        alone.update(piece_row, piece_row, 0)
        beside.update(torch.cat([piece_large, piece_row]), torch.cat([piece_large, piece_row]), 0)
    assert torch.equal(alone.layers[0].keys, beside.layers[0].keys[1:])
    assert torch.equal(alone.layers[0].values, beside.layers[0].values[1:])


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("resdual_length", "residual_length"),
        ("axis-key", "axis_key"),
        ("axis-value", "axis_value"),
        ("q-group-size", "q_group_size"),
        ("groupsize", "group_size"),
        ("n_bits", "nbits"),
        ("layer", "layers"),
    ],
)
def test_misspelt_option_is_ignored_or_refused_without_a_list(written, meant):
    with pytest.raises(ValueError, match=f"{written!r} is not known to 'kivi'.*nbits.*layers.*Did you mean '{meant}'"):
        llama().generate(prompt(4), max_new_tokens=2, cache_implementation="kivi", cache_config={written: 8})


@pytest.mark.parametrize("backend", ["RTN", "Rtn", "rtn "])
def test_backend_in_upper_case_is_refused_without_a_list(backend):
    with pytest.raises(ValueError, match=f"backend={backend!r} is not known. Choose from: .*rtn.* Did you mean 'rtn'"):
        llama().generate(prompt(4), max_new_tokens=2, cache_implementation="kivi", cache_config={"backend": backend})


def test_option_that_is_none_is_unset():
    unset = dict.fromkeys(["nbits", "axis_key", "axis_value", "q_group_size", "residual_length"])
    layer, default = (hfkv.make_cache("kivi", llama().config, **options).layers[0] for options in (unset, {}))
    assert layer.options == default.options


def test_config_dict_is_mutated_so_that_a_model_of_another_depth_fails():
    given = {
        "backend": "rtn",
        "nbits": 4,
        "axis_key": -1,
        "q_group_size": 8,
        "residual_length": 8,
        "layers": {"-1": {"nbits": 8}},
    }
    config, before = copy.deepcopy(given), copy.deepcopy(given)
    deep, shallow = llama(layers=4), llama(layers=2)
    for model in (deep, shallow, deep):
        output = model.generate(
            prompt(30), max_new_tokens=4, cache_implementation="kivi", cache_config=config, return_dict_in_generate=True
        )
        assert config == before
        cache = output[cache_argument(model)]
        assert len(cache.layers) == model.config.num_hidden_layers
        assert [layer.options.nbits for layer in cache.layers] == [4] * (len(cache.layers) - 1) + [8]


# a grid that is not uniform


class NormalLevels(KVQuantizer):
    """Each code stands for a level of a codebook: the middles of equally likely slices of the normal distribution."""

    name = "normal-levels"

    def codebook(self, nbits):
        slices = (torch.arange(2**nbits, dtype=torch.float64) + 0.5) / 2**nbits
        levels = torch.special.ndtri(slices)
        return tuple((levels / levels.max()).tolist())

    def quantize(self, groups, nbits):
        scale = groups.abs().amax(-1).clamp_min(2**-14).half()
        levels = torch.tensor(self.codebook(nbits))
        codes = (groups[..., None] / scale.float()[..., None, None] - levels).abs().argmin(-1)
        return codes.to(torch.uint8), scale, torch.zeros_like(scale)


@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize("nbits", [2, 3, 4, 8])
def test_codebook_levels_stand_in_for_the_uniform_grid(nbits, axis):
    rule = NormalLevels()
    format = PackedFormat(nbits, axis, GROUP, HEAD_DIM, rule.codebook(nbits))
    x = states(2, 2, 3 * GROUP, HEAD_DIM)
    blocks = kernels.pack(x, format, rule)
    restored = kernels.unpack(blocks, torch.float32)
    # each element is one of its group's levels, and the nearest of them
    dim = 3 if axis == "channel" else 4
    pieces = x.view(2, 2, 3, GROUP, HEAD_DIM)
    scale = pieces.abs().amax(dim, keepdim=True).half().float()
    levels = torch.tensor(format.codebook)
    nearest = (pieces[..., None] - scale[..., None] * levels).abs().amin(-1)
    torch.testing.assert_close((restored.view_as(pieces) - pieces).abs(), nearest, rtol=0, atol=1e-6)
    assert restored.view_as(pieces).div(scale).unique().numel() > 2 ** (nbits - 1)
    # levels are float32 whatever the default dtype is
    try:
        torch.set_default_dtype(torch.bfloat16)
        assert torch.equal(kernels.unpack(blocks, torch.float32), restored)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("queries", [1, 3])
def test_attention_reads_a_codebook(queries):
    rule = NormalLevels()
    keys, values = (states(2, 2, 2 * GROUP, HEAD_DIM, seed=seed) for seed in (1, 2))
    exact_keys, exact_values = (states(2, 2, 7, HEAD_DIM, seed=seed) for seed in (3, 4))
    packed = [
        kernels.pack(part, PackedFormat(4, axis, GROUP, HEAD_DIM, rule.codebook(4)), rule)
        for part, axis in ((keys, "channel"), (values, "token"))
    ]
    view = hfkv.cache.KVView.of(exact_keys, exact_values, 0, *packed, None)
    query = states(2, 4, queries, HEAD_DIM, seed=5)
    output, _ = kernels.attend(query, view, scale=HEAD_DIM**-0.5, causal=True)
    all_keys, all_values = (
        torch.cat([kernels.unpack(blocks, torch.float32), exact], 2)
        for blocks, exact in zip(packed, (exact_keys, exact_values), strict=True)
    )
    length = all_keys.shape[2]
    mask = torch.ones(queries, length, dtype=torch.bool).tril(length - queries)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, all_keys, all_values, attn_mask=mask, enable_gqa=True
    )
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
