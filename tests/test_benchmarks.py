"""Tables that are measured in parts, and the benchmark of quantized weights that makes one, on a tiny model."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import transformers

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "benchmarks")]

from parts import PartTable, Run  # noqa: E402
from sitegen import figures  # noqa: E402

COLUMNS = {"name": "Name", "kl": "KL", "speed": "Speed"}
HERE, THERE = {"torch": "2.13.0"}, {"torch": "2.14.0"}


def table_at(path):
    return PartTable(path, "name", COLUMNS, ["a", "b", "c"])


def run(part="quality", machine="here", versions=HERE, **options):
    return Run(part, machine, versions, options)


def test_rows_are_in_order_and_keep_what_was_not_measured(tmp_path):
    table = table_at(tmp_path / "table.json")
    for name in ("x", "c", "a"):
        table.put(run(), name, {"kl": 1.0})
    table.put(run("speed"), "c", {"speed": 3.0})
    table.save()
    again = table_at(tmp_path / "table.json")
    again.put(run(), "b", {"kl": 2.0})
    again.put(run(), "c", {"kl": 4.0})
    saved = again.save()
    assert saved == json.loads((tmp_path / "table.json").read_text())
    assert [(row["name"], row["kl"], row["speed"]) for row in saved["rows"]] == [
        ("a", 1.0, "-"), ("b", 2.0, "-"), ("c", 4.0, 3.0), ("x", 1.0, "-"),
    ]  # fmt: skip
    assert [(each["part"], each["rows"]) for each in saved["runs"]] == [
        ("quality", ["a", "b", "c", "x"]),
        ("speed", ["c"]),
    ]


def test_every_run_that_left_a_row_is_named_and_no_other(tmp_path):
    table = table_at(tmp_path / "table.json")
    for name in ("a", "b"):
        table.put(run(), name, {"kl": 1.0})
    table.put(run(machine="there", versions=THERE), "b", {"kl": 2.0})
    assert table.machines() == "Quality of a on here. Quality of b on there."
    assert table.save()["versions"] == {"torch": "2.13.0 and 2.14.0"}
    table.put(run(machine="there", versions=THERE), "a", {"kl": 2.0})
    table.put(run("trip", "there", THERE), "a", {"speed": 2.0})
    assert table.machines() == "Quality and trip on there."
    assert table.save()["versions"] == THERE


def test_options_that_no_one_command_could_have_are_refused(tmp_path):
    table = table_at(tmp_path / "table.json")
    for name in ("a", "b"):
        table.put(run(tokens=512), name, {"kl": 1.0})
    with pytest.raises(ValueError, match=r"quality of a was measured with tokens=512, and this run has tokens=256"):
        table.check(run(tokens=256), ["b", "c"])
    table.check(run(tokens=256), ["b", "a"])
    table.check(run("speed", repeats=3), ["b"])


def test_table_that_does_not_say_how_it_was_made_is_refused(tmp_path):
    (tmp_path / "table.json").write_text(json.dumps({"rows": []}))
    with pytest.raises(ValueError, match=r"table\.json does not say in which runs"):
        table_at(tmp_path / "table.json")


@pytest.fixture
def no_bars():
    """The benchmark switches them off."""
    yield
    transformers.logging.enable_progress_bar()


@pytest.mark.usefixtures("no_bars")
def test_weights_are_measured_in_parts(model_folder, tmp_path, capsys):
    weights = importlib.import_module("weights")
    file = tmp_path / "figures" / "weights.json"
    file.parent.mkdir()

    def measured(*words):
        fixed = [
            "--model",
            str(model_folder),
            "--folder",
            str(tmp_path / "work"),
            "--save",
            str(file),
            "--tokens",
            "32",
            "--json",
        ]
        weights.main([*fixed, "--repeats", "2", *words])
        found = json.loads(capsys.readouterr().out)
        assert found == json.loads(file.read_text())
        return found, {row["weights"].strip("`"): row for row in found["rows"]}

    eight, two = "rtn-int8:granularity=row", "rtn-int2:symmetric=False,group_size=64"
    with pytest.raises(ValueError, match=r"work has no rtn-int8.*Fix: first --part quality --weights rtn-int8"):
        measured("--part", "trip", "--weights", eight)
    measured("--part", "quality", "--weights", two)
    _, before = measured("--part", "trip", "--weights", two)
    measured("--part", "quality", "--weights", eight)
    measured("--part", "trip", "--weights", eight)
    # every setting of the benchmark's own that is there
    found, rows = measured("--part", "speed")
    # as in the benchmark's own list
    assert list(rows) == ["float32", "bfloat16", eight, two]
    assert rows[two].keys() == found["columns"].keys() == weights.COLUMNS.keys()
    measured_before = {"bits", "error", "worst", "perplexity", "top1", "kl", "trip"}
    assert {name: rows[two][name] for name in measured_before} == {name: before[two][name] for name in measured_before}
    assert all(isinstance(value, float) for name, value in rows[two].items() if name != "weights")
    assert (rows[eight]["trip"], rows[two]["trip"]) == (0, 0)
    assert rows[eight]["kl"] < 0.01 * rows[two]["kl"]
    # 16 bits for each of 512 rows of 64 inputs and 128 of 128; 32 for a group of 64
    assert (rows[eight]["bits"], rows[two]["bits"]) == (pytest.approx(8 + 16 * 640 / 49_152, rel=1e-3), 2.5)
    assert found["command"].endswith(f"--tokens 32 --repeats 2 --weights {eight} --weights {two}")
    assert "OMP_NUM_THREADS=" in found["command"]
    assert figures.load(file.parent) == [found]
    with pytest.raises(ValueError, match="tokens=32, and this run has tokens=16"):
        measured("--part", "quality", "--weights", two, "--tokens", "16")


def test_rows_of_a_speculative_study_are_put_into_its_table(model_folder, tmp_path, capsys):
    speculative = importlib.import_module("speculative")
    file = tmp_path / "figures" / "identity.json"
    file.parent.mkdir()

    def measured(*words):
        fixed = ["--model", str(model_folder), "--prompts", "2", "--rows", "2", "--save", str(file), "--json"]
        speculative.main(["identity", *fixed, *words])
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    first = measured("--new-tokens", "12", "--only", "lookup on plain")
    second = measured("--new-tokens", "12", "--only", "early-exit on kivi")
    assert [row["what"] for row in first + second] == ["lookup on plain", "early-exit on kivi, 8 bit"]
    assert all(row["identical"] == row["prompts"] == 2 and row["examined"] > 0 for row in first + second)
    (found,) = figures.load(file.parent)
    assert found["rows"] == first + second
    asked = f"identity --model {model_folder} --new-tokens 12 --prompts 2 --rows 2"
    assert found["command"] == f"HF_HUB_OFFLINE=1 python benchmarks/speculative.py {asked}"
    assert "12 tokens after 64 of prompt in float32" in found["about"]
    with pytest.raises(ValueError, match="new_tokens=12, and this run has new_tokens=13"):
        measured("--new-tokens", "13", "--only", "lookup on plain")
    with pytest.raises(SystemExit):
        measured("--turns", "2")
    assert "identity has no --turns" in capsys.readouterr().err
