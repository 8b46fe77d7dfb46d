"""``hfkv eval`` and ``hfkv inspect`` as a user calls them, on a tiny model in a folder, and once on a real one."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from hfkv.cli.app import app
from hfkv_lab import studies
from hfkv_lab.parts import PARTS


@pytest.fixture(scope="module")
def folder(small, tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    small.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def run(*arguments, code=0):
    """Call hfkv in this process: importing torch anew takes longer than most of these runs."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "120"})
    assert done.exit_code == code, done.stderr
    return done


SIZES = ("--windows", 2, "--prefill", 200, "--tokens", 32, "--new-tokens", 6)


def test_eval_measures_every_cache(folder, tmp_path):
    page = tmp_path / "out.html"
    caches = ("--cache", "kivi:nbits=8,group_size=8,residual_length=8", "--cache", "kivi:nbits=2,residual_length=0")
    parts = [word for part in PARTS if part != "needles" for word in ("--part", part)]
    done = run("eval", folder, *caches, *SIZES, *parts, "--json", "--report", page)
    found = json.loads(done.stdout)
    plain, fine, coarse = found["caches"]
    assert [cache["label"] for cache in found["caches"]] == [
        "plain",
        "kivi nbits=8 group_size=8 residual_length=8",
        "kivi nbits=2 residual_length=0",
    ]
    assert plain["kl"]["high"] < 1e-9 < fine["kl"]["low"] < fine["kl"]["value"] < coarse["kl"]["value"]
    assert plain["top1"]["value"] == 1
    assert fine["top1"]["low"] <= fine["top1"]["value"] <= fine["top1"]["high"]
    assert plain["bits_per_element"] == 32 > fine["bits_per_element"] > coarse["bits_per_element"]
    assert len(coarse["layers"]) == 3
    assert plain["needles"] is None
    assert found["options"]["windows"] == 2
    assert found["made_with"]["text"] == "pydoc_data.topics"
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg") == 2
    assert "kivi nbits=2 residual_length=0" in text


def test_eval_shows_how_sure_it_is(folder):
    parts = ("--part", "decoding", "--part", "facts")
    done = run("eval", folder, "--cache", "kivi:nbits=2,residual_length=0", *SIZES, *parts)
    # without the line breaks of the terminal
    shown = " ".join(done.stdout.split())
    assert "kivi nbits=2" in shown
    assert "64 predictions" in shown
    assert "95 % intervals" in shown
    assert "So few questions separate little" in shown
    assert "Needles" not in shown


def test_quantized_weights_are_one_more_row(folder):
    done = run(
        "eval", folder, "--weights", "rtn:nbits=8", "--weights", "rtn:nbits=3", *SIZES, "--part", "decoding", "--json"
    )
    plain, eight, three = json.loads(done.stdout)["caches"]
    assert [plain["label"], eight["label"]] == ["plain", "weights rtn nbits=8"]
    assert plain["kl"]["high"] < 1e-9 < eight["kl"]["low"]
    assert eight["kl"]["high"] < three["kl"]["low"]
    assert plain["bits_per_weight"] is None
    assert 8 < eight["bits_per_weight"] < 9


def test_study_is_saved_with_the_command_that_makes_it_again(folder, tmp_path):
    sizes = ("--windows", 1, "--prefill", 200, "--tokens", 16)
    run("eval", folder, "--study", "residual", *sizes, "--save", tmp_path)
    (numbers,) = tmp_path.glob("residual-*.json")
    saved = json.loads(numbers.read_text(encoding="utf-8"))
    assert saved["command"] == f"hfkv eval {folder} --study residual --windows 1 --prefill 200 --tokens 16"
    assert len(saved["rows"]) == 6
    again = run(*saved["command"].split()[1:], "--json")
    for row, other in zip(saved["rows"], json.loads(again.stdout)["rows"], strict=True):
        assert row == pytest.approx({key: other[key] for key in row}, rel=1e-3)


def test_inspect_says_what_it_sees(folder, tmp_path):
    page = tmp_path / "out.html"
    done = run("inspect", folder, "--tokens", 200, "--queries", 16, "--report", page)
    assert "key_axis" in done.stdout
    assert "sink_length" in done.stdout
    assert "<svg" in page.read_text(encoding="utf-8")
    found = json.loads(run("inspect", folder, "--tokens", 200, "--queries", 16, "--json").stdout)
    assert len(found["inspection"]["layers"]) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--study", "axis"), "'axis' is not there. Choose from: axes"),
        (("--study", "axes", "--cache", "kivi"), "leave out --cache or --study"),
        (("--study", "axes", "--part", "facts"), "leave out --part or --study"),
        (("--study", "axes", "--weights", "rtn"), "leave out --weights or --study"),
        (("--study", "granularity", "--tokens", "9"), "granularity looks at weights and reads no text"),
        (("--weights", "rtn:nbits=5"), "nbits=5 is not supported"),
        (("--save", "."), "only a study is saved"),
        (("--study", "axes", "--save", "none"), "there is no folder none. Fix: make it first"),
        (("--part", "speed"), "'speed' is not there. Choose from: decoding"),
        (("--cache", "kivi:nbits=5"), "nbits=5 is not supported"),
        (("--cache", "static"), "needs a length in advance"),
        (("--text", "none.txt"), "none.txt"),
    ],
)
def test_mistake_is_told(folder, arguments, message):
    done = run("eval", folder, *arguments, code=1 if arguments[-1] in ("static", "rtn:nbits=5") else 2)
    told = " ".join(done.stderr.replace("│", " ").split())
    assert message in told


def test_help_names_every_part_and_study():
    shown = " ".join(run("eval", "--help").stdout.replace("│", " ").split())
    assert all(part in shown for part in PARTS)
    assert all(study in shown for study in studies.STUDIES)


def test_real_model_is_evaluated():
    sizes = ("--windows", 1, "--prefill", 256, "--tokens", 32)
    arguments = (
        "eval",
        "smollm2",
        "--cache",
        "kivi:nbits=2,residual_length=32",
        *sizes,
        "--part",
        "decoding",
        "--json",
    )
    plain, packed = json.loads(run(*arguments).stdout)["caches"]
    assert 1 < plain["perplexity"]["value"] < 50
    assert packed["kl"]["low"] > 0.001
    assert packed["bits_per_element"] < plain["bits_per_element"]
