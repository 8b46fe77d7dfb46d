"""The committed tables of quantized weights have the shape that is known of real models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "benchmarks"
BITS = {
    "rtn-int4:granularity=tensor": 4,
    "rtn-int4:granularity=row": 4.02,
    "rtn-int4": 4.13,
    "rtn-int4:symmetric=False": 4.26,
    "rtn-nf4": 4.25,
    "rtn-int8:granularity=row": 8.02,
}


@pytest.fixture(params=["smollm2", "gemma3"])
def rows(request):
    """The rows of a model, by setting."""
    table = json.loads((FOLDER / f"weights-{request.param}.json").read_text())
    return {row["weights"].strip("`"): row for row in table["rows"]}


def test_8_bits_a_row_cost_nothing_measurable(rows):
    row = rows["rtn-int8:granularity=row"]
    assert row["kl"] < 0.005
    assert row["perplexity"] == pytest.approx(rows["float32"]["perplexity"], rel=0.01)


def test_4_bits_want_small_groups_and_a_fitting_grid(rows):
    kl = {name: rows[name]["kl"] for name in BITS}
    assert {name: rows[name]["bits"] for name in BITS} == pytest.approx(BITS, rel=0.003)
    # a tensor, a row, a group of 128, with offsets, nf4
    assert kl["rtn-int4:granularity=tensor"] > 10
    assert 10 > kl["rtn-int4:granularity=row"] > 0.7
    # SmolLM2's rows are of 576 inputs: groups bring less there
    assert kl["rtn-int4"] < 0.8 * kl["rtn-int4:granularity=row"]
    assert kl["rtn-int4:symmetric=False"] < 0.8 * kl["rtn-int4"]
    assert kl["rtn-nf4"] < 0.6 * kl["rtn-int4:symmetric=False"]


@pytest.mark.parametrize("nbits", [3, 4])
def test_awq_beats_the_same_grid_without_it(rows, nbits):
    plain, aware = rows[f"rtn-int{nbits}:symmetric=False"], rows[f"awq-int{nbits}"]
    assert aware["bits"] == plain["bits"]
    assert aware["kl"] < 0.45 * plain["kl"]


def test_every_setting_comes_back_as_it_was_saved(rows):
    trips = {name: row["trip"] for name, row in rows.items() if name not in ("float32", "bfloat16")}
    assert len(trips) >= 24
    assert set(trips.values()) == {0}
