"""`benchmarks/gpu.py`, end to end with tiny sizes: on the machine that has the GPU, there is no time to repair it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "gpu.py"


def run(tmp_path, code=None):
    target = tmp_path / "gpu.json"
    start = [str(SCRIPT)] if code is None else ["-c", code]
    result = subprocess.run(
        [sys.executable, *start, "--smoke", "--json", str(target)],
        capture_output=True, text=True, timeout=600, cwd=tmp_path, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    return result, json.loads(target.read_text())


@pytest.mark.skipif(not SCRIPT.exists(), reason="the plugin is not in the repository, which has the script")
def test_smoke_run(tmp_path):
    result, report = run(tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert report["failures"] == []
    rows = {row["name"]: row for row in report["rows"]}
    assert {"sdpa bfloat16", "kivi 4 bit", "kivi 2 bit"} <= set(rows)
    assert (
        rows["kivi 2 bit"]["stored_bytes"] < rows["kivi 4 bit"]["stored_bytes"] < rows["sdpa bfloat16"]["stored_bytes"]
    )
    assert report["copy_bytes_per_second"] > 0


@pytest.mark.skipif(not SCRIPT.exists(), reason="the plugin is not in the repository, which has the script")
def test_one_failure_does_not_stop_the_others(tmp_path):
    code = f"""
import runpy, sys
sys.argv[0] = {str(SCRIPT)!r}
import hfkv_triton.testing
def broken(*args, **kwargs):
    raise RuntimeError("no such kernel")
hfkv_triton.testing.check_attend = broken
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    result, report = run(tmp_path, code)
    assert result.returncode == 1
    assert all(name.startswith("ops: ") for name in report["failures"])
    assert "no such kernel" in result.stdout
    assert report["rows"]
