"""Every script under `examples/` runs, and what it prints is true."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import hfkv

EXAMPLES = sorted((Path(__file__).resolve().parents[1] / "examples").glob("*.py"))
LAYERS, KV_HEADS, HEAD_DIM = 3, 2, 32


def run(name: str, model_folder: Path, code: str = "", *arguments: str) -> str:
    """What an example prints; ``code`` runs after it, in its namespace, and ``arguments`` are its own."""
    script = next(path for path in EXAMPLES if path.stem == name)
    source = script.read_text(encoding="utf-8") + code
    variables = {key: value for key, value in os.environ.items() if not key.startswith("HFKV_")}
    done = subprocess.run(
        [sys.executable, "-c", source, str(model_folder), *arguments],
        env=variables | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def bits(tokens: int, nbits: int) -> int:
    """Stored bits of one layer with kivi's defaults: the first 4 tokens and at least 128 in float32, blocks packed."""
    blocks = (tokens - 4 - 128) // 32
    exact = 4 + 128 + 32
    elements = 2 * KV_HEADS * HEAD_DIM
    return elements * (32 * exact + blocks * (32 * nbits + 32))


def test_every_example_is_tested():
    tested = set(re.findall(r'run\("(\w+)"', Path(__file__).read_text(encoding="utf-8")))
    assert {path.stem for path in EXAMPLES} == tested


def test_generate_kivi_imports_nothing_from_hfkv_and_packs(model_folder):
    assert "hfkv" not in Path(EXAMPLES[0].parent / "generate_kivi.py").read_text(encoding="utf-8").split('"""')[2]
    counted = """
result = model.generate(**inputs, max_new_tokens=2, cache_implementation="kivi", return_dict_in_generate=True)
import hfkv; print("packed", hfkv.memory(result).packed_bytes)
"""
    shown = run("generate_kivi", model_folder, counted)
    assert int(shown.rpartition("packed ")[2]) > 0


def test_per_layer_reports_each_layer(model_folder):
    shown = run("per_layer", model_folder)
    rows = re.findall(
        r"layer +(\d+)  (\w+) +([\d,]+) packed +([\d,]+) full precision +([\d.]+) bits per element", shown
    )
    kinds = [kind for _, kind, *_ in rows]
    assert kinds == ["KiviLayer", "KiviLayer", "DynamicLayer"]
    # the last of the 20 new tokens is not in the cache
    tokens = len(topics["strings"][:3000].encode()) + 20 - 1
    stored = [int(packed.replace(",", "")) + int(exact.replace(",", "")) for _, _, packed, exact, _ in rows]
    # a block that leaves the residual while decoding makes room for more: at most 1/32 is unused
    assert 1 <= stored[0] / (bits(tokens, 8) / 8) < 1.04
    assert 1 <= stored[1] / (bits(tokens, 2) / 8) < 1.04
    assert stored[2] == 4 * 2 * KV_HEADS * HEAD_DIM * tokens
    assert f"{sum(stored):,} bytes" in shown


def test_multi_turn_computes_only_what_is_new(model_folder):
    shown = run("multi_turn", model_folder)
    turns = [(int(prompt), int(held)) for prompt, held in re.findall(r"(\d+) tokens of prompt, (\d+) of them", shown)]
    assert len(turns) == 3
    assert turns[0][1] == 0
    for (prompt, _), (_, held) in itertools.pairwise(turns):
        # all of the turn before, but the last new token
        assert held == prompt + 32 - 1
    assert f"{turns[-1][0] + 32 - 1} tokens in " in shown


def test_prefix_reuse_leaves_the_document_as_it_was(model_folder):
    shown = run("prefix_reuse", model_folder)
    tokens = len(topics["strings"][:3000].encode())
    assert f"the document: {tokens} tokens in " in shown
    assert f"the document: {tokens} tokens, as before" in shown
    stored = int(re.search(r"in ([\d,]+) bytes", shown)[1].replace(",", ""))
    assert 8 * stored == LAYERS * bits(tokens, 4)


def test_endless_chat_stays_in_its_window(model_folder):
    shown = run("endless_chat", model_folder, "", "--characters", "11000")
    lines = re.findall(r"(\d+) tokens seen, (\d+) kept in ([\d,]+) bytes, [\d.]+ ms per token", shown)
    assert len(lines) >= 3
    assert int(lines[0][0]) < 3000
    assert int(lines[-1][0]) > 10_000
    assert {kept for _, kept, _ in lines} == {"1024"}
    # sinks, window and the room for an eighth of it, in float32
    stored = {int(size.replace(",", "")) for _, _, size in lines}
    assert stored == {LAYERS * 2 * KV_HEADS * HEAD_DIM * 4 * (4 + 1020 + 127)}
    assert "memory x 1.00" in shown


def test_set_default_holds_until_it_is_taken_back(model_folder):
    lines = run("set_default", model_folder).splitlines()
    ours = ["HFKVCache('kivi'" in line for line in lines]
    assert ours == [True, False, True, False]
    assert all("DynamicCache" in line for line, is_ours in zip(lines, ours, strict=True) if not is_ours)


def test_evaluate_cache_orders_the_caches(model_folder):
    lines = run("evaluate_cache", model_folder).splitlines()
    assert [line.partition("  ")[0] for line in lines] == ["plain", "kivi nbits=4", "kivi nbits=2"]
    found = [re.findall(r"KL ([\d.]+) \(([\d.]+) to ([\d.]+)\)", line)[0] for line in lines]
    kl, low, high = zip(*([float(number) for number in numbers] for numbers in found), strict=True)
    assert kl[0] == high[0] == 0
    assert 0 < low[1] <= kl[1] <= high[1]
    assert kl[1] < kl[2]
    assert "top 1 100.0% " in lines[0]


def test_what_fits_is_what_the_formula_says(model_folder):
    shown = run("what_fits", model_folder)
    bytes_of = {
        cache: (int(size.replace(",", "")), int(users.replace(",", "")))
        for cache, size, users in re.findall(r"(\S+) +([\d,]+) bytes at 1,024 tokens +([\d,]+) users", shown)
    }
    # the formula above is for float32; a plan is for 16 bits
    exact = LAYERS * 2 * KV_HEADS * HEAD_DIM * 16 * (4 + 128 + 32) // 8
    plain = LAYERS * 2 * KV_HEADS * HEAD_DIM * 1024 * 2
    four = LAYERS * bits(1024, 4) // 8 - exact
    assert bytes_of["dynamic"][0] == plain
    assert bytes_of["kivi:nbits=4"][0] == four
    weights = int(re.search(r"([\d,]+) bytes of weights", shown)[1].replace(",", ""))
    assert bytes_of["dynamic"][1] == int((8e9 - 1e9 - weights) // plain)


def test_draft_from_own_cache_stores_nothing_more(model_folder):
    same, stored, accepted = run("draft_from_own_cache", model_folder).splitlines()
    assert same == "the same text: True"
    alone, drafting = (int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", stored))
    assert alone == drafting > 0
    taken, examined, forwards = map(int, re.findall(r"\d+", accepted))
    assert 0 < taken <= examined
    assert forwards < 39


def test_speculative_gives_the_same_text(model_folder):
    same, stats = run("speculative", model_folder).splitlines()
    assert same == "the same text: True"
    tokens, forwards = re.match(r"lookup: (\d+) tokens in (\d+) forwards", stats).groups()
    # the first token comes with the prompt
    assert int(tokens) == 99
    assert 0 < int(forwards) <= 99


def test_draft_heads_give_the_same_text(model_folder):
    chain, chain_stats, tree, tree_stats = run("draft_heads", model_folder).splitlines()
    assert chain == tree == "the same text: True"
    for stats in (chain_stats, tree_stats):
        assert re.match(r"medusa: 59 tokens in \d+ forwards .* accepted", stats)


def test_formula_is_that_of_the_cache():
    # the numbers above are compared with a formula: that formula, compared with a cache
    config = LlamaConfig(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM)
    cache = hfkv.make_cache("kivi", config, nbits=2)
    states = torch.randn(1, KV_HEADS, 1000, HEAD_DIM)
    cache.update(states, states.clone(), 0)
    assert 8 * hfkv.memory(cache).stored_bytes == bits(1000, 2)


def test_share_layers_halves_packs_trains_and_loads(model_folder):
    shown = run("share_layers", model_folder)
    sizes = [int(size.replace(",", "")) for size in re.findall(r"([\d,]+) bytes", shown)]
    # of three layers, two store
    assert 3 * sizes[1] == 2 * sizes[0]
    assert 3 * sizes[2] < sizes[1]
    projections = 2 * 64 * KV_HEADS * HEAD_DIM
    assert f"{projections:,} parameters" in shown
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", shown)]
    assert losses[2] < losses[0]
    assert "loaded: {'crosslayer': {'groups': [[0, 1], [2]]}}" in shown


def test_hybrid_shared_is_more_than_20_times_smaller(model_folder):
    shown = run("hybrid_shared", model_folder)
    plain, hybrid = (int(size.replace(",", "")) for size in re.findall(r"([\d,]+) bytes", shown))
    assert plain == 2 * 2 * 30 * 3 * 64 * 8192
    assert plain > 20 * hybrid


def test_convert_makes_a_model_that_loads_and_stores_a_sixth(model_folder):
    shown = run("convert", model_folder)
    assert "dropping 1 of the layers, by influence" in shown
    assert "loaded as it was saved: True" in shown
    sizes = {what: int(size.replace(",", "")) for what, size in re.findall(r"(\w+): .*, ([\d,]+) bytes", shown)}
    # of three layers two are left and one stores, with one KV head of two; an empty layer may keep a counter
    assert sizes["original"] == LAYERS * 2 * KV_HEADS * HEAD_DIM * 4 * (1000 + 1)
    assert sizes["smaller"] == sizes["original"] // 6


def test_latents_are_half_of_the_cache_and_are_packed_as_well(model_folder):
    shown = run("latents", model_folder)
    assert "loaded as it was saved: True" in shown
    sizes = {what: int(size.replace(",", "")) for what, size in re.findall(r"(\w+): ([\d,]+) bytes of cache", shown)}
    assert sizes["original"] == LAYERS * 2 * KV_HEADS * HEAD_DIM * 4 * (1000 + 1)
    # and of each row how much padding stands before its tokens
    assert sizes["latents"] == sizes["original"] // 2 + 8
    # a layer's formula, of half as many numbers
    assert 1 <= sizes["kivi"] / (LAYERS * bits(1001, 4) / 8 / 2) < 1.04


def test_quantize_weights(model_folder):
    output = run("quantize_weights", model_folder)
    assert "7 layers: rtn (nbits=8" in output
    assert "14 layers: rtn (nbits=4" in output
    assert "4.250 bits per weight" in output
    assert "the same logits: True" in output
    # a byte is a token
    assert f"{len('Quantized once, loaded anywhere.') + 8} tokens" in output


def test_calibrated_weights_diverge_less_at_the_same_bits(model_folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    # as in trained models: a few features are far larger than the others
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight[:4] *= 20
            layer.post_attention_layernorm.weight[4:8] *= 20
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(tmp_path)
    found = re.findall(r"(\w+): 3\.50 bits per weight, divergence ([\d.]+)", run("calibrated_weights", tmp_path))
    (plain, aware) = (float(value) for _, value in found)
    assert [name for name, _ in found] == ["rtn", "awq"]
    assert aware < 0.75 * plain


def test_distill_heals(model_folder):
    shown = run("distill", model_folder, "", "15")
    kl = [float(number) for number in re.findall(r"KL ([\d.]+)", shown)]
    assert len(kl) == 2
    assert 0 < kl[1] < kl[0]
