"""Keys and values through latents: what is stored, what comes out of it, in every state of a cache."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

import hfkv
from hfkv.integration import cache_argument
from hfkv.testing.models import logits_error
from hfkv_distill import latent_positions
from hfkv_distill.cache_aware import CacheView
from hfkv_distill.conversions import Conversion, compress_latents, convert, make_local, share_layers
from hfkv_distill.conversions.latents import _second_moments
from hfkv_distill.conversions.measure import kv_bytes
from hfkv_distill.latent import LatentProjection

LAYERS, KV_HEADS, HEAD_DIM = 4, 4, 16
SIZE = KV_HEADS * HEAD_DIM
FAMILIES = ("llama", "qwen2", "qwen3", "gemma3_text")
EVERY = (*FAMILIES, "olmo2", "stablelm", "cohere", "granite")
SAME = 1e-4
KIVI = {"cache_implementation": "kivi", "cache_config": {"nbits": 8, "group_size": 8, "residual_length": 8}}
GREEDY = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}


@pytest.fixture(params=FAMILIES)
def narrow(request, made, tokens):
    """A model with a quarter of the numbers in its cache."""
    return compress_latents(made(request.param), SIZE // 4, tokens())


def whole(model, sequences, new):
    """The logits of the newest tokens, by a forward without a cache."""
    with torch.no_grad():
        return model(sequences, use_cache=False).logits[:, -new - 1 : -1]


@pytest.mark.parametrize("family", EVERY)
def test_at_full_rank_nothing_is_lost(family, made, tokens, error):
    model = made(family)
    full = compress_latents(model, model.model.layers[0].self_attn.k_proj.out_features, tokens())
    assert error(full, model) < SAME
    output = full.generate(tokens(), max_new_tokens=8, **GREEDY)
    assert float(logits_error(torch.stack(output.logits, 1), whole(model, output.sequences, 8)).max()) < SAME


def test_the_text_decides_what_is_lost_and_no_other_directions_lose_less(made, tokens):
    """Keys by their mean square, values by that of what the output projections of their query heads make of them."""
    model, ids = made("qwen2"), tokens(rows=4, length=64)
    moments = {key: moment.clone() for key, moment in _second_moments(model, ids).items()}
    for rank in (3, SIZE // 2):
        narrow = compress_latents(model, rank, ids)
        for (index, name), moment in moments.items():
            before, after = (m.model.layers[index].self_attn.get_submodule(name) for m in (model, narrow))
            assert torch.equal(after.up.bias, before.bias)
            lost = (before.weight - after.up.weight @ after.down.weight).detach().double()
            # from what the projection gave to what of it is lost
            heard = torch.linalg.lstsq(before.weight.detach().double().T, lost.T).solution.T
            root = torch.eye(SIZE).double()
            if name == "v_proj":
                root = torch.zeros(0, SIZE).double()
                reads = model.model.layers[index].self_attn.o_proj.weight.detach().double()
                for head in range(8):
                    row = torch.zeros(64, SIZE).double()
                    kv = HEAD_DIM * (head // 2)
                    row[:, kv : kv + HEAD_DIM] = reads[:, HEAD_DIM * head : HEAD_DIM * (head + 1)]
                    root = torch.cat([root, row])
            lost_square = float((root @ heard @ moment @ heard.T @ root.T).trace())
            # the best that any projection of the rank can do: what the directions that were left out hold
            states = torch.linalg.eigvalsh(root @ moment @ root.T)
            assert lost_square == pytest.approx(float(states[:-rank].sum()), rel=0.02)


def test_a_cache_holds_latents_and_nothing_else(narrow, tokens):
    gc.collect()
    found = len(latent_positions._found)
    cache = DynamicCache(config=narrow.config)
    narrow(tokens(length=6), **{cache_argument(narrow): cache})
    layers, rank = LAYERS, SIZE // 4
    assert [layer.keys.shape for layer in cache.layers] == [(2, 1, 6, rank)] * layers
    # beside the states transformers keeps a counter in layers with a window
    assert 0 <= hfkv.memory(cache).stored_bytes - 2 * 6 * layers * 2 * rank * 4 <= 8 * layers
    assert 4 * kv_bytes(narrow, 6) == 2 * 6 * layers * SIZE * 4
    assert set(vars(cache)) <= {*vars(DynamicCache()), latent_positions._AHEAD}
    # what a forward has worked out for its layers is gone with it
    gc.collect()
    assert len(latent_positions._found) <= found


@pytest.mark.parametrize("settings", [{}, KIVI, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=str)
def test_generation_is_that_of_forwards_without_a_cache(narrow, settings, tokens):
    rows = 1 if "prompt_lookup_num_tokens" in settings else 2
    ids = tokens(rows=rows, length=21)
    if "num_beams" in settings:
        output = narrow.generate(ids, max_new_tokens=12, do_sample=False, **settings)
        plain = narrow.generate(ids, max_new_tokens=12, do_sample=False, use_cache=False, **settings)
        assert torch.equal(output, plain)
        return
    output = narrow.generate(ids, max_new_tokens=12, **GREEDY, **settings)
    bound = 0.1 if settings is KIVI else SAME
    assert float(logits_error(torch.stack(output.logits, 1), whole(narrow, output.sequences, 12)).max()) < bound
    if settings is KIVI:
        packed = [layer for layer in hfkv.memory(output).layers if layer.kind == "KiviLayer"]
        assert len(packed) >= 2
        for layer in packed:
            assert layer.elements == rows * 32 * 2 * SIZE // 4
            assert layer.packed_bytes > 0


def test_padding_on_the_left_changes_nothing(narrow, tokens):
    ids = tokens(rows=3, length=12)
    mask = torch.ones_like(ids)
    for row, padding in ((1, 5), (2, 1)):
        ids[row, :padding], mask[row, :padding] = 0, 0
    for settings in ({}, {"prefill_chunk_size": 4}):
        together = narrow.generate(ids, attention_mask=mask, max_new_tokens=6, **GREEDY, **settings)
        for row, padding in ((0, 0), (1, 5), (2, 1)):
            alone = narrow.generate(ids[row : row + 1, padding:], max_new_tokens=6, **GREEDY)
            logits = torch.stack(together.logits, 1)[row], torch.stack(alone.logits, 1)[0]
            assert float(logits_error(*logits).max()) < SAME


@torch.no_grad()
def test_chunks_crops_and_copies_of_a_cache(made, tokens):
    model, ids = compress_latents(made("gemma3_text", sliding_window=64), 8, tokens()), tokens(length=20)
    expected = model(ids, use_cache=False).logits
    exact = {"group_size": 8, "residual_length": 64}
    for cache in (
        DynamicCache(config=model.config), hfkv.make_cache("kivi", model, **exact),
        StaticCache(config=model.config, max_cache_len=32),
    ):  # fmt: skip
        arguments = {cache_argument(model): cache}
        model(ids[:, :7], **arguments)
        actual = model(ids[:, 7:12], **arguments).logits
        assert float(logits_error(actual, expected[:, 7:12]).max()) < SAME
        if isinstance(cache, StaticCache):
            continue
        cache.crop(-3)
        copied = copy.deepcopy(cache)
        for each in (cache, copied):
            actual = model(ids[:, 9:], **{cache_argument(model): each}).logits
            assert float(logits_error(actual, expected[:, 9:]).max()) < SAME


@torch.no_grad()
def test_a_cache_that_is_reset_begins_anew(made, tokens):
    """Also for rows with other padding than those before."""
    model, ids = compress_latents(made("llama"), 8, tokens()), tokens(length=12)
    cache = hfkv.make_cache("kivi", model, group_size=8, residual_length=64)
    for padding in (0, 4):
        cache.reset()
        arguments = {cache_argument(model): cache}
        mask = torch.ones_like(ids)
        mask[0, :padding] = 0
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        for part in (slice(0, 6), slice(6, 12)):
            logits = model(
                ids[:, part], attention_mask=mask[:, : part.stop], position_ids=positions[:, part], **arguments
            )
        alone = model(ids[:1, padding:], use_cache=False).logits
        assert float(logits_error(logits.logits[:1, -1], alone[:, -1]).max()) < SAME


@torch.no_grad()
def test_positions_that_are_changed_in_place_are_read_anew(made, tokens):
    """A loop that keeps one tensor of positions and counts it up."""
    model, ids = compress_latents(made("llama"), 8, tokens()), tokens(length=10)
    arguments, positions = {cache_argument(model): DynamicCache(config=model.config)}, torch.zeros(1, 1).long()
    for place in range(10):
        logits = model(ids[:, place : place + 1], position_ids=positions, **arguments).logits
        positions += 1
    assert float(logits_error(logits, model(ids, use_cache=False).logits[:, -1:]).max()) < SAME


@torch.no_grad()
def test_padding_between_tokens_is_refused(made, tokens):
    """Turns of different lengths, each padded on the left: a distance in the cache is no distance in the text."""
    model = compress_latents(made("llama"), 8, tokens())
    arguments = {cache_argument(model): DynamicCache(config=model.config)}
    mask = torch.tensor([[1] * 4, [0, 1, 1, 1]])
    model(tokens(length=4), attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), **arguments)
    mask = torch.cat([mask, torch.tensor([[0, 1], [1, 1]])], 1)
    with pytest.raises(NotImplementedError, match="not neighbours"):
        model(tokens(length=2), attention_mask=mask, position_ids=(mask.cumsum(1) - 1)[:, 4:], **arguments)


def test_what_cannot_be_right_is_refused_by_name(made, tokens):
    model = compress_latents(made("llama"), 8, tokens())
    with pytest.raises(NotImplementedError, match=r"drops tokens.*without a window"):
        model.generate(tokens(length=30), max_new_tokens=2, cache_implementation="sink",
                       cache_config={"window_length": 8, "sink_length": 2})  # fmt: skip
    with pytest.raises(NotImplementedError, match="holds latents"):
        CacheView(model, "kivi", {})
    for rank in (0, SIZE + 1):
        with pytest.raises(ValueError, match=f"latent_rank={rank}.* {SIZE} channels"):
            compress_latents(made("llama"), rank, tokens())
    with pytest.raises(ValueError, match="come before latents"):
        compress_latents(model, 4, tokens())
    with pytest.raises(ValueError, match="map='similar'"):
        share_layers(model, 2, map="similar", input_ids=tokens())
    with pytest.raises(ValueError, match="before sharing"):
        compress_latents(share_layers(made("llama"), 2), 4, tokens())
    dynamic = made("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    with pytest.raises(NotImplementedError, match="rope_type='dynamic'"):
        compress_latents(dynamic, 8, tokens())
    # every fourth layer turns nothing
    with pytest.raises(NotImplementedError, match="off"):
        compress_latents(made("smollm3", no_rope_layers=[1, 1, 1, 0]), SIZE, tokens())


def test_in_a_chain_before_sharing_saved_and_loaded(tmp_path, made, tokens, error):
    asked = Conversion(
        drop_layers=1, width=0.75, kv_heads=1, local=(1, 1), window=8, latent_rank=6, share_layers=[[0, 2]]
    )
    model = convert(made("llama"), asked, tokens())
    model.save_pretrained(tmp_path)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert error(loaded.eval(), model) == 0
    assert loaded.config.hfkv["latent"] == {"rank": 6}
    tied = loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert tied
    # of three layers one stores nothing, one has a window
    assert kv_bytes(loaded, 100) == (8 + 100) * 2 * 6 * 4 or kv_bytes(loaded, 100) == 2 * 8 * 2 * 6 * 4
    ids = tokens(rows=2, length=12)
    for each in (model, loaded, copy.deepcopy(loaded)):
        output = each.generate(ids, max_new_tokens=12, **GREEDY)
        assert float(logits_error(torch.stack(output.logits, 1), whole(model, output.sequences, 12)).max()) < SAME


def test_windows_hold_latents(made, tokens):
    model = compress_latents(make_local(made("llama"), 1, 1, 8), 8, tokens())
    output = model.generate(tokens(length=12), max_new_tokens=12, **GREEDY)
    assert float(logits_error(torch.stack(output.logits, 1), whole(model, output.sequences, 12)).max()) < SAME
    assert kv_bytes(model, 100) == 2 * (8 + 100) * 2 * 8 * 4


def test_in_a_process_of_its_own_and_never_random_without_hfkv(tmp_path, made, tokens):
    model = compress_latents(made("llama"), SIZE, tokens())
    model.save_pretrained(tmp_path)
    source = """
import sys, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
torch.save(model(torch.arange(1, 25)[None]).logits, sys.argv[1] + "/logits.pt")
"""
    found = {}
    for autoload in ("1", "0"):
        found[autoload] = subprocess.run(
            [sys.executable, "-c", source, str(tmp_path)], env={**os.environ, "HFKV_AUTOLOAD": autoload},
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
    assert found["1"].returncode == 0, found["1"].stderr
    with torch.no_grad():
        expected = model(torch.arange(1, 25)[None]).logits
    assert torch.allclose(torch.load(tmp_path / "logits.pt"), expected, atol=1e-5)
    assert found["0"].returncode == 1
    assert "mismatch" in found["0"].stderr.lower()


def test_what_is_trained_is_the_passage(made, tokens):
    model = compress_latents(made("qwen3"), 8, tokens())
    ids = tokens()
    model(ids, labels=ids).loss.backward()
    projections = [module for module in model.modules() if isinstance(module, LatentProjection)]
    assert len(projections) == 2 * LAYERS
    for projection in projections:
        assert projection.down.weight.grad.abs().max() > 0
        assert projection.up.weight.grad.abs().max() > 0


def test_bfloat16_stays_bfloat16(made, tokens):
    model = compress_latents(made("qwen3").bfloat16(), 8, tokens())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
