"""What hfkv adds to ``import torch``: the time of its entry point, in several fresh processes.

    python benchmarks/autoload.py
    python benchmarks/autoload.py --processes 20 --json

PyTorch looks entry points up in any case; what hfkv adds is that one is loaded and called. Prints the median and the
longest of all processes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

from timing import Table, machine_line

# torch does the same at the end of its import, untimed
CODE = """
import time, torch
from importlib.metadata import entry_points
[found] = entry_points(group="torch.backends", name="hfkv")
start = time.perf_counter()
found.load()()
print(time.perf_counter() - start)
"""


def milliseconds() -> float:
    """Of the entry point, in a process that has just imported torch without it."""
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    result = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True)
    return float(result.stdout) * 1e3


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the table")
    options = parser.parse_args()
    table = Table({"machine": machine_line()}, ["processes  median ms  longest ms"], options.json)
    times = [milliseconds() for _ in range(options.processes)]
    row = {"processes": len(times), "median_ms": statistics.median(times), "longest_ms": max(times)}
    table.add(row, f"{row['processes']:>9} {row['median_ms']:>10.2f} {row['longest_ms']:>11.2f}")
    table.close()


if __name__ == "__main__":
    main()
