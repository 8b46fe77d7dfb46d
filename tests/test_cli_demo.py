"""`hfkv demo` and what it is made of, on a tiny random model with a byte-level tokenizer."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import torch
import transformers
from transformers import DynamicCache
from typer.testing import CliRunner

import hfkv
from hfkv.cli.app import app
from hfkv.cli.models import load_model
from hfkv.cli.prompts import long_text
from hfkv.cli.quality import compare, decode_quality
from hfkv.cli.settings import PLAIN, Setting, parse_cache
from hfkv.cli.weights import WeightSetting, parse_weights
from hfkv.integration import cache_argument
from hfkv.kernels import forget_choices

HEADS, HEAD_DIM, LAYERS = 2, 32, 3
PROMPT, NEW = 400, 12


@pytest.fixture(scope="module")
def folder(model_folder):
    """What `--model` takes."""
    return str(model_folder)


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder)[0]


@pytest.fixture(autouse=True)
def verbosity():
    """The demo silences transformers, in a process that is its own; here it is not."""
    before = transformers.logging.get_verbosity()
    yield
    transformers.logging.set_verbosity(before)


def demo(folder, *arguments, code=0):
    result = CliRunner().invoke(app, ["demo", "--model", folder, *arguments])
    assert result.exit_code == code, result.output
    return result


def report(folder, *arguments):
    sizes = ("--prompt-tokens", str(PROMPT), "--max-new-tokens", str(NEW))
    return json.loads(demo(folder, "--json", *sizes, *arguments).stdout)


def test_report_counts_what_generate_stores(folder):
    found = report(folder, "--no-quality")
    plain, four, two = found["caches"]
    assert [item["label"] for item in found["caches"]] == ["plain", "kivi nbits=4", "kivi nbits=2"]
    assert found["prompt_tokens"] == PROMPT
    # the last new token is not in the cache: nothing was predicted from it
    numbers = 2 * LAYERS * HEADS * HEAD_DIM * (PROMPT + NEW - 1)
    assert plain["stored_bytes"] == 4 * numbers
    assert plain["bits_per_element"] == 32
    assert plain["ratio"] == 1
    for item in (four, two):
        assert item["ratio"] == pytest.approx(plain["stored_bytes"] / item["stored_bytes"])
        assert item["bits_per_element"] == pytest.approx(8 * item["stored_bytes"] / numbers)
        assert item["kernel"]
    assert two["stored_bytes"] < four["stored_bytes"] < plain["stored_bytes"]
    for item in found["caches"]:
        assert item["tokens_per_second"] > 0
        assert item["seconds_to_first_token"] > 0
    assert found["quality"] is None
    assert plain["kl"] is None


def test_text_is_what_generate_says(folder):
    model, tokenizer = load_model(folder)
    input_ids = tokenizer(long_text()[:4000], return_tensors="pt").input_ids[:, :PROMPT]
    options = {"nbits": 8, "residual_length": 32}
    found = report(folder, "--no-quality", "--cache", "kivi:nbits=8", "--option", "residual_length=32")
    for item, arguments in zip(
        found["caches"], ({}, {"cache_implementation": "kivi", "cache_config": options}), strict=True
    ):
        output = model.generate(
            input_ids, do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW, use_cache=True, **arguments
        )
        assert item["text"] == tokenizer.decode(output[0, PROMPT:], skip_special_tokens=True)
    assert found["caches"][1]["options"] == options


def test_quality_in_the_report_is_that_of_the_cache(folder, model):
    found = report(folder, "--cache", "kivi:nbits=8,sink_length=0", "--cache", "kivi:nbits=2")
    measured = found["quality"]
    assert measured["prefill"] == 1024
    _, tokenizer = load_model(folder)
    total = measured["prefill"] + measured["tokens"]
    input_ids = tokenizer(long_text()[:8000], return_tensors="pt").input_ids[:, :total]
    for item in found["caches"][1:]:
        cache = hfkv.make_cache("kivi", model, **item["options"])
        kl, top1 = decode_quality(model, input_ids, measured["prefill"], DynamicCache(config=model.config), cache)
        assert (item["kl"], item["top1"]) == pytest.approx((kl, top1), rel=1e-3)
    eight, two = found["caches"][1:]
    assert eight["kl"] < two["kl"] / 10


def test_quantized_weights_compose_with_caches(folder):
    found = report(folder, "--weights", "rtn-int4:group_size=32", "--cache", "kivi:nbits=8,residual_length=32")
    assert found["dtype"] == "bfloat16"
    label = "rtn-int4 group_size=32"
    rows = found["caches"]
    assert [item["label"] for item in rows] == [
        "plain",
        f"{label} + plain",
        f"{label} + kivi nbits=8 residual_length=32",
    ]
    plain, weights, both = rows
    # the cache is the same, whatever the weights are
    assert weights["stored_bytes"] == plain["stored_bytes"] > both["stored_bytes"]
    model, tokenizer = load_model(folder, "bfloat16")
    before = hfkv.describe(model).stored_bytes
    hfkv.quantize_weights(model, hfkv.WeightConfig("rtn", nbits=4, group_size=32))
    measured = hfkv.describe(model)
    assert found["weights"] == {
        "label": label,
        "bits_per_weight": 4.5,
        "stored_bytes": measured.stored_bytes,
        "plain_bytes": before,
    }
    input_ids = tokenizer(long_text()[:4000], return_tensors="pt").input_ids[:, :PROMPT]
    for item, arguments in (
        (weights, {}),
        (both, {"cache_implementation": "kivi", "cache_config": {"nbits": 8, "residual_length": 32}}),
    ):
        output = model.generate(input_ids, do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW, **arguments)
        assert item["text"] == tokenizer.decode(output[0, PROMPT:], skip_special_tokens=True)
    # what 8 bits of cache cost is nothing beside 4 bits of weights
    assert both["kl"] == pytest.approx(weights["kl"], rel=0.2)
    assert weights["kl"] > 1e-4


def test_terminal_shows_what_the_weights_take(folder):
    sizes = ("--prompt-tokens", "100", "--max-new-tokens", "2", "--no-quality")
    shown = demo(folder, *sizes, "--weights", "rtn-int8", "--cache", "kivi").output
    assert "rtn-int8 + kivi" in shown
    assert re.search(r"rtn-int8: 8\.\d+ bits per quantized weight; the model takes \d+ MiB in place of \d+", shown)


@pytest.mark.parametrize(
    ("text", "backend", "options", "label"),
    [
        ("rtn", "rtn", {}, "rtn"),
        ("rtn-int4", "rtn", {"nbits": 4}, "rtn-int4"),
        ("rtn-nf4", "rtn", {"quant_type": "nf4"}, "rtn-nf4"),
        ("rtn-int3:group_size=64, symmetric=false", "rtn", {"group_size": 64, "symmetric": False, "nbits": 3},
         "rtn-int3 group_size=64 symmetric=False"),
        ("rtn:nbits=2", "rtn", {"nbits": 2}, "rtn nbits=2"),
    ],
)  # fmt: skip
def test_weights_are_parsed(text, backend, options, label):
    assert parse_weights(text) == WeightSetting(backend, options, label)
    assert parse_weights(text).config() == hfkv.WeightConfig(backend, **options)


def test_every_type_of_every_backend_has_a_name():
    for text in ("bnb-int8", "bnb-nf4", "bnb-fp4", "quanto-float8", "quanto-int2", "hqq-int1", "awq-int3", "awq-int4"):
        pytest.importorskip({"bnb": "bitsandbytes", "quanto": "optimum.quanto", "hqq": "hqq"}.get(text[:-5], "hfkv"))
        config = parse_weights(text).config()
        assert str(config.options["nbits"]) in text or config.options["quant_type"] in text


def test_backend_that_reads_a_text_gets_the_tokenizer():
    tokenizer = object()
    assert parse_weights("awq-int4").config(tokenizer).options["tokenizer"] is tokenizer
    assert "tokenizer" not in parse_weights("rtn-int4").config(tokenizer).options


def test_terminal_shows_texts_and_the_table(folder):
    shown = demo(folder, "--prompt-tokens", "200", "--max-new-tokens", "4", "--no-quality", "--cache", "kivi").output
    rows = [line.split() for line in shown.splitlines()]
    (plain,) = (row for row in rows if row[:1] == ["plain"] and row[-1] == "-")
    (kivi,) = (row for row in rows if row[:1] == ["kivi"] and row[-1] == "-")
    assert plain[4:7] == ["0.3", "MiB", "32.0"]
    assert float(kivi[6]) < 32
    # each text under its heading
    assert shown.index("plain ─") < shown.index("kivi ─") < shown.index("tokens/s")


@pytest.fixture(params=["reference", "cpu"])
def kernel(request, monkeypatch):
    """The kernel that is forced, and forgotten after."""
    if request.param == "cpu":
        pytest.importorskip("hfkv_cpu", reason="where nothing faster is installed, reference is all there is")
    monkeypatch.setenv("HFKV_KERNELS", request.param)
    forget_choices()
    yield request.param
    forget_choices()


def test_terminal_says_what_reads_packed_blocks_faster(folder, kernel):
    shown = demo(folder, "--prompt-tokens", "400", "--max-new-tokens", "4", "--no-quality", "--cache", "kivi").output
    assert f"what is packed: {kernel} (" in shown
    assert ("'hfkv[cpu]'" in shown) is (kernel == "reference")


def test_prompt_comes_from_a_file_or_from_the_command_line(folder, tmp_path):
    text = "A prompt of so many bytes."
    (tmp_path / "prompt.txt").write_text(text)
    arguments = ("--json", "--max-new-tokens", "2", "--no-quality")
    by_file = json.loads(demo(folder, *arguments, "--prompt-file", str(tmp_path / "prompt.txt")).stdout)
    by_option = json.loads(demo(folder, *arguments, "--prompt", text).stdout)
    assert by_file["prompt_tokens"] == by_option["prompt_tokens"] == len(text)
    assert by_file["caches"][0]["text"] == by_option["caches"][0]["text"]
    cut = json.loads(demo(folder, *arguments, "--prompt", text, "--prompt-tokens", "5").stdout)
    assert cut["prompt_tokens"] == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cache", "kvii"], "Did you mean 'kivi'?"),
        (["--cache", "kivi:nbitz=2"], "nbitz"),
        (["--cache", "kivi:nbits=5"], "nbits=5"),
        (["--cache", "kivi:nbits"], "key=value"),
        (["--cache", ":nbits=2"], "names no cache"),
        (["--option", "nbits"], "key=value"),
        (["--cache", "static:nbits=2"], "takes no options"),
        (["--prompt", "a", "--prompt-file", __file__], "one of --prompt and --prompt-file"),
        (["--prompt", "  "], "empty"),
        (["--prompt-file", "no-such-file"], "no-such-file"),
        (["--dtype", "float8"], "float8"),
        (["--max-new-tokens", "0"], "max-new-tokens"),
        (["--weights", "rtm-int4"], "Did you mean 'rtn'?"),
        (["--weights", "rtn-int5"], "nbits=5 is not supported"),
        (["--weights", "rtn-fp4"], "quant_type='fp4' is not supported"),
        (["--weights", "rtn-int4:nbits=3"], "says nbits twice"),
        (["--weights", ":nbits=3"], "names no weights"),
    ],
)
def test_wrong_usage_exits_with_2_before_a_model_is_loaded(arguments, message):
    result = demo("no-such-model", *arguments, code=2)
    assert message in " ".join(result.output.replace("│", " ").split())


def test_prompt_that_does_not_fit_names_the_fix(folder):
    result = demo(folder, "--prompt-tokens", "4090", "--max-new-tokens", "64", code=1)
    assert "4,096" in result.output
    assert "--prompt-tokens 4032" in result.output


def test_unknown_model_is_one_line(folder):
    result = demo("./no-such-folder", code=1)
    assert "hfkv demo: './no-such-folder' is not a folder" in result.output
    assert "Traceback" not in result.output


def test_cache_is_parsed():
    assert parse_cache("kivi") == Setting("kivi")
    assert parse_cache("kivi:nbits=2,backend=rtn") == Setting("kivi", {"nbits": 2, "backend": "rtn"})
    # what is written with the name wins over what all share
    assert parse_cache("kivi:nbits=2", ["nbits=4", "sink_length=0"]).options == {"nbits": 2, "sink_length": 0}
    assert parse_cache("kivi", ["layers={'0': 'dynamic'}"]).options == {"layers": {"0": "dynamic"}}
    assert parse_cache("kivi:nbits=2").label == "kivi nbits=2"
    assert PLAIN.label == "plain"


def test_values_of_a_cache_are_json_or_python():
    assert parse_cache('kivi:layers={"0": {"nbits": 8, "group_size": 64}, "-1": "dynamic"},nbits=2').options == {
        "layers": {"0": {"nbits": 8, "group_size": 64}, "-1": "dynamic"},
        "nbits": 2,
    }
    found = parse_cache("any: flag=true, other=False, none=null, text=a b, quoted='x,y', list=[1, 2]").options
    assert found == {"flag": True, "other": False, "none": None, "text": "a b", "quoted": "x,y", "list": [1, 2]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (":nbits=2", "names no cache; write NAME"),
        ("kivi:nbits", "'nbits' is not of the form key=value"),
        ("kivi:layers={0: ", "layers={0: is not JSON; write lists and dicts as"),
        ("none.json", "'none.json': no such file. Fix"),
    ],
)
def test_cache_of_another_form_is_refused_with_the_fix(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_cache(text)


def test_cache_is_read_from_a_file_as_generate_takes_it(tmp_path):
    path = tmp_path / "tuned.json"
    path.write_text('{"cache_implementation": "kivi", "cache_config": {"nbits": 2}}')
    assert parse_cache(str(path)) == Setting("kivi", {"nbits": 2}, "tuned")
    assert parse_cache(str(path)).label == "tuned"
    default = tmp_path / "mine" / "generation_config.json"
    default.parent.mkdir()
    default.write_text('{"hfkv": {"cache": "kivi", "nbits": 3}, "eos_token_id": 0}')
    assert parse_cache(str(default)) == Setting("kivi", {"nbits": 3}, "mine")
    path.write_text('{"cache_config": {"nbits": 2}}')
    with pytest.raises(ValueError, match=r"names no cache\. Fix: write it as"):
        parse_cache(str(path))
    path.write_text("nbits=2")
    with pytest.raises(ValueError, match="is not JSON"):
        parse_cache(str(path))


def test_quality_against_itself_is_perfect(model):
    input_ids = torch.randint(0, 256, (2, 100))
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    assert decode_quality(model, input_ids, 60, *caches) == pytest.approx((0, 1), abs=1e-9)
    assert [cache.get_seq_length() for cache in caches] == [100, 100]


def test_quality_is_the_divergence_of_the_logits(model):
    """Compare with logits of one forward for the reference, and of token by token decoding for the cache."""
    torch.manual_seed(0)
    input_ids = torch.randint(0, 256, (2, 101))
    options = {"nbits": 2, "residual_length": 0, "sink_length": 0, "group_size": 16}
    cache = hfkv.make_cache("kivi", model, **options)
    kl, top1 = decode_quality(model, input_ids, 60, DynamicCache(config=model.config), cache, chunk=1)
    other = hfkv.make_cache("kivi", model, **options)
    with torch.no_grad():
        expected = model(input_ids).logits[:, 60:].double().log_softmax(-1)
        argument = {cache_argument(model): other}
        model(input_ids[:, :60], **argument)
        steps = [model(input_ids[:, at : at + 1], **argument).logits for at in range(60, 101)]
    actual = torch.cat(steps, dim=1).double().log_softmax(-1)
    assert kl == pytest.approx(float((expected.exp() * (expected - actual)).sum(-1).mean()), rel=1e-3)
    assert kl > 0.01
    assert top1 == pytest.approx(float((expected.argmax(-1) == actual.argmax(-1)).float().mean()), abs=0.02)


def test_caches_compared_together_are_as_compared_alone(model):
    torch.manual_seed(0)
    input_ids = torch.randint(0, 256, (1, 120))
    options = [{"nbits": nbits, "residual_length": 0} for nbits in (2, 8)]

    def make(index):
        return hfkv.make_cache("kivi", model, **options[index])

    together = compare(model, input_ids, 70, DynamicCache(config=model.config), [make(0), make(1)])
    for index, quality in enumerate(together):
        alone = decode_quality(model, input_ids, 70, DynamicCache(config=model.config), make(index))
        assert (quality.kl, quality.top1) == pytest.approx(alone, abs=1e-6)


def test_quality_needs_tokens_to_decode(model):
    with pytest.raises(ValueError, match="prefill=100"):
        decode_quality(model, torch.zeros(1, 100, dtype=torch.long), 100, DynamicCache(), DynamicCache())


def test_demo_without_kivi_names_the_fix(folder):
    variables = os.environ | {"HFKV_PLUGINS": ""}
    done = subprocess.run(
        [sys.executable, "-m", "hfkv.cli", "demo"], env=variables, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "pip install 'hfkv[kivi]'" in done.stderr
