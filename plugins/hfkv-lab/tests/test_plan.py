"""`hfkv plan`: its bytes are those of real caches, its figures the published ones."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, DeepseekV3Config, DynamicCache, LlamaConfig, MixtralConfig
from typer.testing import CliRunner

import hfkv
from hfkv.cli.app import app
from hfkv.cli.settings import parse_cache
from hfkv.testing.models import load
from hfkv_lab import batching
from hfkv_lab.arguments import parse_quantity
from hfkv_lab.cards import CARDS, find_card
from hfkv_lab.plan import CachePlan, fit
from hfkv_lab.plan_model import from_config, from_name, from_numbers
from hfkv_lab.plan_weights import FORMATS, parse_weights
from hfkv_lab.roofline import Roofline, expected_tokens, speculation

CACHES = ("dynamic", "kivi:nbits=2", "kivi:nbits=3,group_size=64,sink_length=0", "kivi:key_nbits=8,residual_length=40")
# layers, query heads, KV heads, head_dim
SHAPES = ((24, 14, 2, 64), (3, 4, 4, 80), (2, 8, 1, 128))


def llama(layers, heads, kv_heads, head_dim):
    return LlamaConfig(
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim,
        hidden_size=heads * head_dim, intermediate_size=64, vocab_size=64,
    )  # fmt: skip


def real_bytes(config, setting, tokens, dtype, rows=1):
    """What a cache holds that was filled with a prompt."""
    cache = DynamicCache(config=config)
    if setting.is_ours:
        cache = hfkv.make_cache(setting.name, config, **setting.options)
    for layer in range(config.num_hidden_layers):
        states = torch.zeros(rows, config.num_key_value_heads, tokens, config.head_dim, dtype=dtype)
        cache.update(states, states.clone(), layer)
    return hfkv.memory(cache).stored_bytes


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("cache", CACHES)
def test_bytes_are_those_of_a_real_cache(shape, cache):
    config, setting = llama(*shape), parse_cache(cache)
    for dtype in (torch.float16, torch.float32):
        plan = CachePlan(from_config(config), setting, dtype)
        for tokens in (1, 131, 300):
            assert plan.bytes(tokens, 2) == real_bytes(config, setting, tokens, dtype, rows=2), tokens


def test_bytes_follow_per_layer_settings():
    setting = parse_cache('kivi:nbits=2,layers={"0": "dynamic", "1": {"nbits": 8}}')
    config = llama(*SHAPES[1])
    plan = CachePlan(from_config(config), setting)
    assert plan.bytes(400) == real_bytes(config, setting, 400, torch.float16)


def mla():
    config = DeepseekV3Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=24, q_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=8, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        first_k_dense_replace=1,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "gemma4", "mla"])
@pytest.mark.parametrize("cache", ["dynamic", "kivi:nbits=4,group_size=8,residual_length=8"])
def test_bytes_are_those_that_a_model_leaves(family, cache):
    # sliding layers, layers that read another's, heads of two sizes, latents
    model = mla() if family == "mla" else load(family, "sdpa").model
    setting, plan = parse_cache(cache), CachePlan(from_config(model.config), parse_cache(cache), torch.float32)
    prompt = torch.randint(5, 60, (1, 20), generator=torch.Generator().manual_seed(0))
    # the step after the prompt is that in which a sliding layer lets go of what has left the window
    output = model.generate(
        prompt, max_new_tokens=2, min_new_tokens=2, do_sample=False, return_dict_in_generate=True,
        **setting.generate_arguments(),
    )  # fmt: skip
    assert hfkv.memory(output).stored_bytes == plan.bytes(21)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "gemma4"])
def test_parameters_are_those_of_the_model(family):
    model = load(family, "sdpa").model
    assert from_config(model.config).parameters.total == sum(parameter.numel() for parameter in model.parameters())


def test_experts_that_are_not_chosen_are_not_multiplied():
    config = MixtralConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    found = from_config(config).parameters
    experts = 2 * 8 * 3 * 16 * 24
    assert found.experts == experts
    assert found.active == found.total - 50 * 16 - experts * 6 // 8


def test_published_figures_come_out():
    # 24 layers, 2 KV heads of 64: 12,288 bytes a token in float16
    assert CachePlan(from_config(llama(*SHAPES[0])), parse_cache("dynamic")).bytes(1) == 12288
    seven = from_numbers(num_hidden_layers=32, num_key_value_heads=8, head_dim=128, params=7e9)
    assert CachePlan(seven, parse_cache("dynamic")).bytes(1) == 128 * 1024
    thirteen = from_numbers(num_hidden_layers=40, num_key_value_heads=40, head_dim=128, params=13.016e9)
    cache = CachePlan(thirteen, parse_cache("dynamic"), torch.bfloat16)
    assert cache.bytes(1) == 800 * 1024
    roofline = Roofline(thirteen, FORMATS["bfloat16"], cache, find_card("h100"))
    assert roofline.step_seconds(1, 1000) == pytest.approx(8e-3, rel=0.02)
    assert roofline.tokens_per_second(1, 1000) == pytest.approx(124, rel=0.02)
    assert roofline.weight_bytes + cache.bytes(1000, 256) == pytest.approx(240e9, rel=0.02)


def test_llama_2_13b_has_its_parameters():
    config = LlamaConfig(
        vocab_size=32000, hidden_size=5120, intermediate_size=13824, num_hidden_layers=40, num_attention_heads=40,
    )  # fmt: skip
    assert from_config(config).parameters.total == 13_015_864_320


@pytest.mark.parametrize("missing", ["num_hidden_layers", "hidden_size", "num_attention_heads", "model_type"])
def test_config_without_a_field_is_refused_by_its_name(tmp_path, missing):
    config = llama(*SHAPES[1]).to_dict()
    config.pop(missing)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"config.json has no {missing}. Fix: add it"):
        from_name(str(tmp_path))


def test_field_that_is_missing_can_be_said(tmp_path):
    config = llama(*SHAPES[1]).to_dict()
    config.pop("num_hidden_layers")
    (tmp_path / "config.json").write_text(json.dumps(config))
    planned = from_name(str(tmp_path), {"num_hidden_layers": 5})
    assert len(planned.shapes) == 5
    with pytest.raises(ValueError, match="missing: --head-dim, --params"):
        from_numbers(num_hidden_layers=5, num_key_value_heads=1)


@settings(max_examples=40, deadline=None)
@given(room=st.integers(0, 2**32), cache=st.sampled_from(CACHES))
def test_longest_context_is_the_longest_that_fits(room, cache):
    plan = CachePlan(from_config(llama(*SHAPES[2])), parse_cache(cache))
    longest = plan.longest(room)
    assert longest == 0 or plan.bytes(longest) <= room
    assert plan.bytes(longest + 1) > room


def test_fit_counts_users_weights_and_overhead():
    model = from_numbers(num_hidden_layers=32, num_key_value_heads=8, head_dim=128, params=7e9)
    cache = CachePlan(model, parse_cache("dynamic"))
    found = fit(model, FORMATS["bfloat16"], cache, 24e9, users=4, context=8192, overhead=1e9)
    assert found.longest_context == (24e9 - 1e9 - 14e9) // 4 // (128 * 1024)
    assert found.most_users == (24e9 - 1e9 - 14e9) // (8192 * 128 * 1024)
    small = fit(model, FORMATS["bfloat16"], cache, 8e9)
    assert (small.longest_context, small.most_users) == (0, 0)


def test_weights_count_scales_and_what_stays_in_16_bits():
    parameters = from_config(llama(*SHAPES[1])).parameters
    assert (
        parse_weights("int4:group_size=128").bytes_of(parameters)
        == round(parameters.matrices * (0.5 + 4 / 128)) + 2 * parameters.rest
    )
    assert FORMATS["float32"].bytes_of(parameters) == 4 * parameters.total
    for text, message in (
        ("int5", "Did you mean"),
        ("int8:group_size=4", "takes no options"),
        ("nf4:group_size=0", "po"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_weights(text)


def test_roofline_takes_the_longer_of_moving_and_multiplying():
    model = from_numbers(num_hidden_layers=2, num_key_value_heads=4, head_dim=32, params=1e6)
    cache = CachePlan(model, parse_cache("dynamic"))
    card = find_card("a100-80gb")
    roofline = Roofline(model, FORMATS["bfloat16"], cache, card)
    weights, read = roofline.decode(1, 100).parts
    assert (weights.moved, weights.operations) == (2e6, 2e6)
    assert (read.moved, read.operations) == (2 * 2 * 4 * 32 * 2 * 100, 4 * 2 * 4 * 32 * 100)
    assert weights.seconds(card) == 2e6 / card.bandwidth
    # one operation a byte for each row, until the card's own ratio is reached
    many = roofline.decode(1000, 100).parts[0]
    assert many.intensity == 1000
    assert many.seconds(card) == 2e9 / card.flops
    assert roofline.prefill(512).parts[0].operations == 2e6 * 512


def test_expected_tokens_of_a_round_are_what_a_simulation_gives():
    draw = random.Random(0)
    rounds = 20000
    for acceptance, length in ((0.8, 4), (0.5, 7)):
        total = 0
        for _ in range(rounds):
            accepted = next((index for index in range(length) if draw.random() >= acceptance), length)
            total += accepted + 1
        assert total / rounds == pytest.approx(expected_tokens(acceptance, length), rel=0.02)
    assert expected_tokens(1, 5) == 6
    assert expected_tokens(0, 5) == 1
    with pytest.raises(ValueError, match=r"--acceptance 1\.2 must lie between 0 and 1"):
        expected_tokens(1.2, 3)


def test_speculation_pays_by_what_drafting_and_verifying_cost():
    model = from_numbers(num_hidden_layers=32, num_key_value_heads=8, head_dim=128, params=7e9)
    roofline = Roofline(model, FORMATS["bfloat16"], CachePlan(model, parse_cache("dynamic")), find_card("h100"))
    # bound by the bandwidth, verifying five tokens takes as long as decoding one
    found = speculation(roofline, 0.8, 4, 0.1, 1, 1000)
    assert found.cost == pytest.approx(1.4)
    assert found.speedup == pytest.approx(expected_tokens(0.8, 4) / 1.4)
    # a full batch is bound by compute: there is nothing to win
    assert speculation(roofline, 0.8, 4, 0.1, 512, 10).speedup < 1


def test_batching_is_that_of_a_schedule_done_by_hand():
    # one second a step, whatever it holds
    def second(rows, context):
        return 1.0

    static = batching.static([1, 4, 2, 2], 2, 10, second)
    assert static.seconds == 4 + 2
    assert static.mean_latency == (1 + 4 + 6 + 6) / 4
    assert static.utilization == 9 / 12
    continuous = batching.continuous([1, 4, 2, 2], 2, 10, second)
    # the third takes the first's place after a step, the fourth the third's after three
    assert continuous.seconds == 5
    assert continuous.mean_latency == (1 + 4 + 3 + 5) / 4
    assert continuous.tokens_per_second == 9 / 5
    # answers of one length leave nothing to win
    equal = [run([7] * 6, 3, 10, second) for run in (batching.static, batching.continuous)]
    assert equal[0] == equal[1]


def test_answers_have_the_mean_that_was_asked_for():
    found = batching.lengths(20000, 256, 1.0)
    assert sum(found) / len(found) == pytest.approx(256, rel=0.05)
    assert found == batching.lengths(20000, 256, 1.0)


@pytest.mark.parametrize(
    ("text", "units", "plain", "value"),
    [
        ("80GB", ("b",), 1e9, 80e9),
        ("24", ("b",), 1e9, 24e9),
        ("24GiB", ("b",), 1e9, 24 * 2**30),
        ("3.35 TB/s", ("b/s", "b"), 1e9, 3.35e12),
        ("989T", ("flop/s",), 1.0, 989e12),
        ("1e15", ("flop/s",), 1.0, 1e15),
    ],
)
def test_quantities(text, units, plain, value):
    assert math.isclose(parse_quantity("--x", text, plain, units), value)


def test_quantity_or_card_of_another_form_is_refused():
    for text in ("many", "-3GB", "0", "3 parsec"):
        with pytest.raises(ValueError, match=r"--memory .* is not a quantity above zero; write it as 80GB"):
            parse_quantity("--memory", text, 1e9, ("b",))
    with pytest.raises(ValueError, match="Did you mean 'h100'"):
        find_card("h10")
    assert all(card.flops / card.bandwidth > 50 for card in CARDS.values())


def plan(*arguments, code=0):
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert result.exit_code == code, result.output
    return result


NUMBERS = ("--layers", "32", "--kv-heads", "8", "--head-dim", "128", "--params", "7e9")


def test_command_prints_tables_json_and_a_report(tmp_path):
    report = tmp_path / "plan.html"
    shown = plan(*NUMBERS, "--card", "h100", "--acceptance", "0.8", "--requests", "20", "--batch", "4",
                 "--report", str(report)).output  # fmt: skip
    for title in ("Weights", "Cache of one user", "Longest context for 1 user", "Roofline", "Speculative", "Batching"):
        assert title in shown
    assert report.read_text().count("<svg") == 2
    found = json.loads(plan(*NUMBERS, "--card", "h100", "--context", "4096", "--json").stdout)
    assert found["caches"]["plain"]["bytes"] == 4096 * 128 * 1024
    assert found["weights"]["bfloat16"] == 14_000_000_000
    assert found["roofline"]["card"]["bandwidth"] == 3.35e12
    assert {one["memory"] for one in found["fits"]} == {80e9}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--layers", "3"), "missing: --kv-heads, --head-dim, --params"),
        ((*NUMBERS, "--acceptance", "0.5"), "--acceptance needs a --card"),
        ((*NUMBERS, "--dtype", "int4"), "Choose from: float16"),
        ((*NUMBERS, "--cache", "quantized"), "plan knows dynamic, static and the plugins' caches"),
        ((*NUMBERS, "--draft-length", "3", "--card", "h100"), "--draft-length needs --acceptance"),
    ],
)
def test_command_names_the_option_and_the_fix(arguments, message):
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert result.exit_code != 0
    assert message in " ".join(result.output.replace("│", " ").split())


def test_packaged_model_is_planned_from_its_config():
    found = json.loads(plan("smollm2", "--json", "--dtype", "float32").stdout)
    assert found["parameters"]["total"] == 134_515_008
    assert found["caches"]["plain"]["bytes"] == 30 * 2 * 3 * 64 * 4 * 8192
