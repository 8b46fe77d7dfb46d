"""What this distribution adds to hfkv."""

from collections.abc import Iterator

import hfkv


@hfkv.hookimpl
def hfkv_kernels() -> Iterator[hfkv.KernelSpec]:
    """The kernels "triton"."""
    # no `requires`: the builds for ROCm and for Intel GPUs bring the module `triton` under other names
    yield hfkv.KernelSpec(
        name="triton",
        summary="Triton, for GPUs: scales folded into query and weights, the context split over the processors",
        load="hfkv_triton.kernels:kernels",
        priority=30,
    )
