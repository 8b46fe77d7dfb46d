"""The most memory that a piece of work held, above what was held when it began."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


class Peak:
    """A measurement; ``bytes`` and ``method`` are there once it is over."""

    bytes: int = 0
    method: str = ""


@contextmanager
def peak(device: torch.device) -> Iterator[Peak]:
    """Measure the peak of what runs inside.

    On CUDA: of the allocator. Elsewhere: of the resident memory of the process, from the kernel's own high-water mark
    where it may be reset (Linux), else from samples.
    """
    found = Peak()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield found
        torch.cuda.synchronize(device)
        found.bytes = torch.cuda.max_memory_allocated(device) - before
        found.method = "CUDA allocator"
        return
    _give_back()
    if _reset():
        before = _status("VmRSS")
        yield found
        found.bytes, found.method = max(0, _status("VmHWM") - before), "high-water mark of the process"
        return
    with _sampled() as samples:
        yield found
    found.bytes, found.method = max(samples) - samples[0], "samples of the process, every 2 ms"


def _give_back() -> None:
    """Return freed memory to the system, or the next run would reuse it unseen."""
    # there is none where the C library is not glibc
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def _reset() -> bool:
    """Set the high-water mark to what is resident now; say whether that is allowed."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True


def _status(field: str) -> int:
    """Bytes of a line of the process's status."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no {field}")


@contextmanager
def _sampled() -> Iterator[list[int]]:
    process, over = psutil.Process(), threading.Event()
    samples = [process.memory_info().rss]

    def sample() -> None:
        while not over.wait(0.002):
            samples.append(process.memory_info().rss)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        samples.append(process.memory_info().rss)
        over.set()
        thread.join()
