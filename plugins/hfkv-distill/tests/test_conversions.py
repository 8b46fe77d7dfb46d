"""Conversions: each against what it must not change, in every family; saved, loaded, in chains and with every cache."""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import hfkv
from hfkv.integration import cache_argument
from hfkv.testing.models import logits_error
from hfkv_distill.conversions import (
    Conversion,
    block_influence,
    choose_layers,
    convert,
    drop_layers,
    make_local,
    merge_kv_heads,
    prune_width,
    share_layers,
)
from hfkv_distill.conversions.measure import compare, kv_bytes

# norms of single heads; biases; windows, factors on the embeddings and norms that multiply by one more; tied weights
FAMILIES = ("llama", "qwen2", "qwen3", "gemma3_text")
SAME = 1e-4
KIVI = {"nbits": 8, "group_size": 8, "residual_length": 64}


@pytest.fixture(params=FAMILIES)
def model(request, made):
    return made(request.param)


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@torch.no_grad()
def test_the_mean_of_equal_heads_is_each_of_them(model, error):
    for layer in model.model.layers:
        for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            for parameter in projection.parameters():
                heads = parameter.view(2, 2, 16, -1)
                heads[:, 1] = heads[:, 0]
    before = state(model)
    merged = merge_kv_heads(model, 2)
    assert error(merged, model) < SAME
    assert merged.config.num_key_value_heads == 2
    assert merged.model.layers[0].self_attn.k_proj.weight.shape == (32, 64)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@torch.no_grad()
def test_heads_that_differ_are_averaged(model, error):
    merged = merge_kv_heads(model, 1)
    old = model.model.layers[1].self_attn.v_proj.weight.view(4, 16, 64)
    assert torch.allclose(merged.model.layers[1].self_attn.v_proj.weight, old.mean(0))
    assert error(merged, model) > 0.01


@torch.no_grad()
def test_norms_over_all_heads_are_merged_with_them(made, error):
    model = made("olmo2")
    for layer in model.model.layers:
        for part in (layer.self_attn.k_proj, layer.self_attn.v_proj, layer.self_attn.k_norm):
            heads = part.weight.view(2, 2, 16, -1)
            heads[:, 1] = heads[:, 0]
    assert error(merge_kv_heads(model, 2), model) < SAME


@torch.no_grad()
def test_to_drop_layers_that_do_nothing_changes_nothing(model, tokens, error):
    for index in (0, 3):
        layer = model.model.layers[index]
        for parameter in (*layer.self_attn.o_proj.parameters(), *layer.mlp.down_proj.parameters()):
            parameter.zero_()
    influence = block_influence(model, tokens())
    assert max(influence[0], influence[3]) < 1e-5 < min(influence[1:3])
    for by in ("influence", "kl"):
        assert choose_layers(model, tokens(), 2, by) == [0, 3]
    dropped = drop_layers(model, [0, 3])
    assert error(dropped, model) < SAME
    assert dropped.config.num_hidden_layers == len(dropped.model.layers) == 2
    assert [layer.self_attn.layer_idx for layer in dropped.model.layers] == [0, 1]
    kinds = getattr(model.config, "layer_types", None)
    assert kinds is None or dropped.config.layer_types == kinds[1:3]


def test_the_divergence_sees_what_the_influence_cannot(made, tokens):
    """A layer that turns the hidden state into a channel that nothing reads has influence and costs nothing."""
    model = made("llama", tie_word_embeddings=False)
    with torch.no_grad():
        # the last channel reaches no projection and no logit
        for name, weight in model.named_parameters():
            if name.endswith(("layernorm.weight", "model.norm.weight")):
                weight[-1] = 0
        layer = model.model.layers[2]
        for parameter in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
            parameter[:-1] = 0
            parameter[-1] *= 0.5
    # it changes the norm of what the next layer reads a little, and that is all
    assert choose_layers(model, tokens(), 1, "kl") == [2]


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_to_cut_channels_that_are_zero_changes_nothing(family, made, tokens, error):
    """A quarter of the hidden channels, of each layer's neurons and of its KV heads is zero: others in each layer."""
    model = made(family)
    generator = torch.Generator().manual_seed(2)
    silent = torch.randperm(64, generator=generator)[:16]
    model.model.embed_tokens.weight[:, silent] = 0
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for parameter in (*attention.o_proj.parameters(), *mlp.down_proj.parameters()):
            parameter[silent] = 0
        mlp.down_proj.weight[:, torch.randperm(64, generator=generator)[:16]] = 0
        head = int(torch.randint(4, (1,), generator=generator))
        attention.o_proj.weight[:, 32 * head : 32 * (head + 1)] = 0
    narrow = prune_width(model, 0.75, tokens())
    config = narrow.config
    sizes = (config.hidden_size, config.intermediate_size, config.num_attention_heads, config.num_key_value_heads)
    assert sizes == (48, 48, 6, 3)
    assert config.head_dim == 16
    assert error(narrow, model) < 1e-3
    tied = narrow.lm_head.weight is narrow.model.embed_tokens.weight
    assert tied == (model.lm_head.weight is model.model.embed_tokens.weight)


@torch.no_grad()
def test_windows_longer_than_the_text_change_nothing(made, tokens, error):
    for family in ("llama", "mistral", "qwen2", "qwen3"):
        model = made(family, **({"sliding_window": None} if family == "mistral" else {}))
        wide, narrow = (make_local(model, 1, 1, window) for window in (24, 6))
        assert error(wide, model) < SAME, family
        assert error(narrow, model) > 0.01, family
        assert narrow.config.layer_types == ["sliding_attention", "full_attention"] * 2
        # what a window hides in the first layer: the last token's logits change, those of the first tokens do not
        assert error(narrow, model, tokens()[:, :6]) < SAME, family


@torch.no_grad()
def test_local_layers_keep_their_window_alone(made):
    model = made("llama")
    local = make_local(model, 3, 1, 8)
    ids = torch.randint(1, 64, (1, 100))
    cache = DynamicCache(config=local.config)
    for part in (ids[:, :99], ids[:, 99:]):
        local(part, **{cache_argument(local): cache})
    # beside the states transformers keeps a counter
    assert 0 <= hfkv.memory(cache).stored_bytes - kv_bytes(local, 100) <= 3 * 16
    assert kv_bytes(local, 100) == (3 * 8 + 100) * 2 * 4 * 16 * 4
    assert kv_bytes(model, 100) == 4 * 100 * 2 * 4 * 16 * 4


@torch.no_grad()
def test_layers_that_share_halve_the_cache(made, error):
    model = made("qwen3")
    before = state(model)
    shared = share_layers(model, 2)
    assert 2 * kv_bytes(shared, 100) == kv_bytes(model, 100)
    assert state(model).keys() == before.keys()
    alike = copy.deepcopy(model)
    for index in (1, 3):
        # keys and values of a pair agree where what they read does, and here nothing comes between
        alike.model.layers[index].load_state_dict(alike.model.layers[index - 1].state_dict())
        for parameter in (alike.model.layers[index - 1].self_attn.o_proj, alike.model.layers[index - 1].mlp.down_proj):
            parameter.weight.zero_()
    assert error(share_layers(alike, 2), alike) < SAME


CHAIN = Conversion(drop_layers=1, width=0.75, kv_heads=1, local=(1, 1), window=8, share_layers=[[0, 2]])


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@torch.no_grad()
def test_all_in_one_chain_saved_and_loaded(family, tmp_path, made, tokens):
    said = []
    converted = convert(made(family), CHAIN, tokens(), said.append)
    assert len(said) == 5
    converted.save_pretrained(tmp_path)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    ids = tokens()
    assert torch.equal(loaded.eval()(ids).logits, converted(ids).logits)
    assert converted.config.layer_types == ["sliding_attention", "full_attention", "sliding_attention"]
    generates_the_same(loaded, tokens(rows=1, length=12))


def generates_the_same(model, ids):
    """Every cache gives the logits of a forward without one, whatever was dropped before."""
    for settings in ({}, {"cache_implementation": "kivi", "cache_config": KIVI}, {"cache_implementation": "sink"}):
        output = model.generate(
            ids, max_new_tokens=12, do_sample=False, return_dict_in_generate=True, output_logits=True, **settings
        )
        with torch.no_grad():
            whole = model(output.sequences, use_cache=False).logits[:, ids.shape[1] - 1 : -1]
        assert float(logits_error(torch.stack(output.logits, dim=1), whole).max()) < SAME, settings


@pytest.mark.parametrize("dropped", [[0], [1], [3], [0, 2], [0, 2, 3]])
def test_stale_layer_idx_layers_are_numbered_anew(dropped, model, tmp_path, error, tokens):
    """transformers raises IndexError, or reads another layer's keys, where layers are taken out of the list."""
    short = drop_layers(model, dropped)
    generates_the_same(short, tokens(rows=1, length=12))
    short.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert error(loaded, short) == 0


def test_in_a_process_of_its_own_and_without_hfkv(tmp_path, made, tokens):
    """What no longer shares is an ordinary checkpoint; what shares is refused and never random."""
    ordinary = Conversion(drop_layers=1, width=0.75, kv_heads=1, local=(1, 1), window=8)
    plain, shared = tmp_path / "plain", tmp_path / "shared"
    converted = convert(made("llama"), ordinary, tokens())
    converted.save_pretrained(plain)
    share_layers(made("llama"), 2).save_pretrained(shared)
    source = """
import sys, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
torch.save(model(torch.arange(1, 25)[None]).logits, sys.argv[1] + "/logits.pt")
transformers.AutoModelForCausalLM.from_pretrained(sys.argv[2])
"""
    done = subprocess.run(
        [sys.executable, "-c", source, str(plain), str(shared)],
        env={**os.environ, "HFKV_AUTOLOAD": "0"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    with torch.no_grad():
        expected = converted(torch.arange(1, 25)[None]).logits
    assert torch.allclose(torch.load(plain / "logits.pt"), expected, atol=1e-5)
    assert done.returncode == 1
    assert "k_proj.weight" in done.stderr
    assert "mismatch" in done.stderr.lower()


def test_bfloat16_stays_bfloat16(tmp_path, made, tokens):
    converted = convert(made("qwen3").bfloat16(), CHAIN, tokens())
    assert {parameter.dtype for parameter in converted.parameters()} == {torch.bfloat16}
    assert converted.config.dtype == torch.bfloat16


def test_quality_of_a_model_and_itself_is_perfect(made, tokens):
    model = made("llama")
    pieces = [tokens(rows=1), tokens(rows=1, length=9)]
    same = compare(model, model, pieces)
    assert (same.kl, same.top1) == (0, 1)
    assert same.perplexity == same.original_perplexity
    with torch.no_grad():
        losses = [float(model(piece, labels=piece).loss) * (piece.shape[1] - 1) for piece in pieces]
    assert same.perplexity == pytest.approx(math.exp(sum(losses) / 31), rel=1e-4)
    other = compare(model, drop_layers(model, [1]), pieces)
    assert other.kl > 0.01
    assert other.top1 < 1


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (lambda model, ids: merge_kv_heads(model, 3), ValueError, r"kv_heads=3.* 4 KV heads.*\[1, 2\]"),
        (lambda model, ids: merge_kv_heads(model, 4), ValueError, r"\[1, 2\]"),
        (lambda model, ids: drop_layers(model, [4]), ValueError, "0 to 3"),
        (lambda model, ids: drop_layers(model, range(4)), ValueError, "not all"),
        (lambda model, ids: choose_layers(model, ids, 4), ValueError, "1 to 3 can be dropped"),
        (lambda model, ids: choose_layers(model, ids, 1, "size"), ValueError, "influence, kl"),
        (lambda model, ids: prune_width(model, 1.0, ids), ValueError, "less than 1"),
        (lambda model, ids: prune_width(model, 0.99, ids), ValueError, "cuts nothing"),
        (lambda model, ids: make_local(model, 0, 1), ValueError, "local=0"),
        (lambda model, ids: make_local(make_local(model), 1, 1), ValueError, "local layers already, of 512"),
        (lambda model, ids: convert(model, Conversion(), ids), ValueError, "nothing is to be converted"),
        (lambda model, ids: drop_layers(share_layers(model, 2), [1]), ValueError, "before sharing"),
        (lambda model, ids: share_layers(model, 2, map="alike"), ValueError, "neighbours, similar"),
    ],
)
def test_what_cannot_be_says_why(change, error, says, made, tokens):
    with pytest.raises(error, match=says):
        change(made("llama"), tokens())


@pytest.mark.parametrize(
    ("family", "change", "says"),
    [
        ("gpt2", lambda model, ids: merge_kv_heads(model, 2), "not built like Llama"),
        ("phi3", lambda model, ids: drop_layers(model, [1]), "not built like Llama"),
        ("mixtral", lambda model, ids: prune_width(model, 0.75, ids), "mlp"),
        ("olmo2", lambda model, ids: prune_width(model, 0.75, ids), "q_norm"),
        ("stablelm", lambda model, ids: prune_width(model, 0.75, ids), "LayerNorm"),
        ("granite", lambda model, ids: make_local(model), "no local layers.*llama, mistral"),
        ("gemma3_text", lambda model, ids: make_local(model), "local layers already, of 8"),
        ("llama", lambda model, ids: make_local(model), "attention_bias|bias"),
    ],
)
def test_architectures_that_are_not_known_are_refused(family, change, says, made, tokens):
    changes = {"num_local_experts": 2} if family == "mixtral" else {}
    if family == "llama":
        changes = {"attention_bias": True}
    if family == "gpt2":
        changes = {"n_layer": 4}
    with pytest.raises((NotImplementedError, ValueError), match=says):
        change(made(family, **changes), tokens())
