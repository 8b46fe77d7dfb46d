"""`hfkv bench`: what it counts is what the caches hold, in turns; its knee is where the curve bends."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from hfkv.cli.app import app
from hfkv.cli.settings import Setting, parse_cache
from hfkv_lab import peak as peaks
from hfkv_lab.bench import Load, bench, default_settings, knee, unavailable

# layers, keys and values, KV heads, head_dim, bytes: one token of the model `small`
TOKEN = 3 * 2 * 2 * 16 * 4
PLAIN, KIVI = Setting("dynamic"), parse_cache("kivi:nbits=4,group_size=8,residual_length=8")


def test_runs_are_in_turns_and_bytes_are_the_caches(small):
    ids = torch.randint(0, 256, (2, 300))
    said = []
    # the shorter one last: a static cache is made for it, and not kept from before
    loads = [Load(2, 300, 4), Load(1, 100, 4)]
    found = bench(small, ids, [PLAIN, Setting("static"), KIVI], loads, rounds=3, step=said.append)
    # each round runs all three, each time another one first
    order = [text.split()[0].rstrip(":") for text in said if text is not None and "warming" not in text]
    assert order[:9] == "plain static kivi static kivi plain kivi plain static".split()
    by_name = {(one.cache, one.load): one for one in found.measured}
    for load in loads:
        plain = by_name["plain", load]
        # the last new token is not in the cache
        assert plain.stored_bytes == TOKEN * load.batch_size * (load.context + 3)
        assert by_name[KIVI.label, load].stored_bytes < plain.stored_bytes / 2
        # keys and values for every token that there will be, and a counter of 8 bytes in each layer
        static = by_name["static", load].stored_bytes
        assert TOKEN * load.batch_size * (load.context + 4) <= static <= TOKEN * load.batch_size * (load.context + 5)
    for one in found.measured:
        assert len(one.first_token) == len(one.per_token) == len(one.peak_bytes) == 3
        assert all(seconds > 0 for seconds in one.first_token + one.per_token)
        assert one.tokens_per_second == [one.load.batch_size / seconds for seconds in one.per_token]


def test_library_that_is_missing_is_a_reason_and_no_error(small, monkeypatch):
    monkeypatch.setattr("transformers.utils.is_optimum_quanto_available", lambda: False)
    reason = unavailable(Setting("quantized"))
    assert reason == "backend 'quanto' needs optimum-quanto (not installed). Fix: pip install optimum-quanto"
    found = bench(small, torch.randint(0, 256, (1, 64)), [PLAIN, Setting("quantized")], [Load(1, 32, 3)], rounds=1)
    assert found.skipped == {"quantized": reason}
    assert [one.cache for one in found.measured] == ["plain"]
    assert unavailable(PLAIN) is None


def test_defaults_are_transformers_caches_and_ours():
    names = [setting.name for setting in default_settings(True)]
    assert names[:3] == ["dynamic", "static", "quantized"]
    assert "kivi" in names
    assert "kivi" not in [setting.name for setting in default_settings(False)]


PEAK = """
import torch
from hfkv_lab import peak
if {sampled}:
    peak._reset = lambda: False
# freed before it begins: must not hide what comes
freed = torch.ones(60 << 20, dtype=torch.uint8)
del freed
with peak.peak(torch.device("cpu")) as found:
    block = torch.ones({mib} << 20, dtype=torch.uint8)
    import time; time.sleep(0.05)
    del block
print(found.bytes, found.method)
"""


@pytest.mark.parametrize("sampled", [False, True])
def test_peak_is_what_was_allocated_and_freed_again(sampled):
    # in a process of its own: the memory of this one moves for other reasons
    for mib in (50, 200):
        done = subprocess.run(
            [sys.executable, "-c", PEAK.format(sampled=sampled, mib=mib)],
            env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=True,
        )  # fmt: skip
        size, _, method = done.stdout.partition(" ")
        assert int(size) == pytest.approx(mib << 20, rel=0.1)
        assert ("samples" in method) == (sampled or not peaks._reset())


def test_knee_is_where_the_curve_bends():
    # doubling the batch doubles the rate up to 8, then only the latency
    latency = [10, 10.5, 11, 12, 24, 48]
    rate = [100, 190, 363, 666, 670, 672]
    assert knee(latency, rate) == 3
    assert knee([1, 1, 1, 1], [1, 2, 4, 8]) == 3
    assert knee([1, 2, 3], [9, 8, 7]) == 0
    # a straight line, and one that gets steeper
    assert knee([1, 2], [1, 2]) is None
    assert knee([1, 2, 3], [1, 2, 3]) is None
    assert knee([41, 77, 106], [24, 25, 37]) is None


@pytest.fixture(scope="module")
def folder(small, tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    small.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def run(folder, *arguments, code=0):
    sizes = ("--context", "64", "--context", "200", "--batch", "1", "--batch", "2", "--batch", "3", "--rounds", "2")
    result = CliRunner().invoke(app, ["bench", folder, "--new-tokens", "4", *sizes, *arguments])
    assert result.exit_code == code, result.output
    return result


def test_command_prints_tables_json_and_a_report(folder, tmp_path):
    report = tmp_path / "bench.html"
    caches = ("--cache", "static", "--cache", "kivi:nbits=4,group_size=8,residual_length=8")
    shown = run(folder, *caches, "--report", str(report)).output
    for text in ("Times", "Bytes", "Throughput against latency at 64 tokens", "knee"):
        assert text in shown
    assert report.read_text().count("<svg") == 2
    found = json.loads(run(folder, *caches, "--json").stdout)
    loads = [(one["batch"], one["context"]) for one in found["runs"][::3]]
    assert loads == [(1, 64), (1, 200), (2, 64), (3, 64)]
    # the plain cache is there without being named, and first
    assert [one["cache"] for one in found["runs"][:3]] == ["plain", "static", KIVI.label]
    assert found["runs"][0]["stored_bytes"] == TOKEN * 67
    assert set(found["knees"]) == {"plain", "static", KIVI.label}
    assert set(found["knees"].values()) <= {1, 2, 3, None}


def test_transformers_quantized_cache_is_measured(folder):
    # hqq, for quanto compiles an extension when it is first used
    quantized = parse_cache("quantized:backend=hqq,nbits=4")
    found = json.loads(run(folder, "--cache", "quantized:backend=hqq,nbits=4", "--json").stdout)
    assert found["skipped"] == {}
    assert found["runs"][1]["cache"] == quantized.label
    assert found["runs"][1]["stored_bytes"] != found["runs"][0]["stored_bytes"]
    assert unavailable(quantized) is None


def test_context_beyond_the_model_is_refused(folder):
    result = CliRunner().invoke(app, ["bench", folder, "--context", "5000", "--cache", "static"])
    assert result.exit_code != 0
    assert "the model takes 4,096 tokens" in " ".join(result.output.split())
