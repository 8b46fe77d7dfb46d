"""What this distribution adds to hfkv."""

from collections.abc import Iterator

import hfkv


@hfkv.hookimpl
def hfkv_kernels() -> Iterator[hfkv.KernelSpec]:
    """The kernels "cpu"."""
    yield hfkv.KernelSpec(
        name="cpu",
        summary="C++ with AVX-512, AVX2 or portable vectors, on torch's threads, split over the context",
        load="hfkv_cpu.kernels:kernels",
        priority=20,
    )
