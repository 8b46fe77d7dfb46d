"""What every benchmark shares: the machine in one line, and medians of timings that were taken in turns."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers


def processor() -> str:
    """The processor's name, as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def machine_line() -> str:
    """What the figures below it depend on."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return f"{processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, load {load:.1f}; {software()}"


def software() -> str:
    """What figures depend on that are no times."""
    return f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"


def in_turns(calls: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each call. One after the other in every round: what disturbs the machine meets them all."""
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


class Table:
    """Rows that are printed as they come, under lines that say what they are; or one JSON object at the end.

    Parameters
    ----------
    report
        What the JSON object holds, ``"machine"`` among it, besides the rows.
    head
        The lines above the rows; the machine comes before them.
    as_json
        Which of the two.
    """

    def __init__(self, report: dict[str, Any], head: list[str], as_json: bool) -> None:
        self.report: dict[str, Any] = {**report, "rows": []}
        self.as_json = as_json
        self._print(report["machine"], *head)

    def _print(self, *lines: str) -> None:
        if not self.as_json:
            print(*lines, sep="\n", flush=True)

    def add(self, row: dict[str, Any], line: str) -> None:
        """Keep a row, and print it as this line."""
        self.report["rows"].append(row)
        self._print(line)

    def close(self) -> None:
        """Print the JSON object, where it was asked for."""
        if self.as_json:
            print(json.dumps(self.report, indent=2))
