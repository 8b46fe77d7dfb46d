"""The op table: few, fat ops, and the choice of who runs them.

``HFKV_KERNELS`` names the kernels to use (``reference`` is always there); by default the best that supports the
request. A kernel that fails raises: there is no silent fallback.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from .. import registry
from ..cache.packed import PackedBlocks, PackedFormat
from ..cache.quantizer import KVQuantizer
from ..cache.view import KVView
from ..specs import KernelSpec
from ..weights.grid import Grid, PackedWeight
from .reference import ReferenceKernels

Op = Literal["pack", "unpack", "attend", "dequantize", "matmul"]


@dataclass(frozen=True)
class Request:
    """What an op is asked for; kernels say whether they support it.

    ``formats`` has one entry for pack and unpack, and (keys, values) for attend; ``quantizer`` is set for pack,
    ``grid`` for dequantize and matmul.
    """

    op: Op
    device: str
    dtype: torch.dtype
    formats: tuple[PackedFormat, ...] = ()
    quantizer: str | None = None
    grid: Grid | None = None


class Kernels(Protocol):
    """What a `KernelSpec` loads. `ReferenceKernels` documents the shapes."""

    name: str

    def supports(self, request: Request) -> tuple[bool, str]:
        """Whether the request can be run, and why (not)."""

    def pack(self, states: torch.Tensor, format: PackedFormat, quantizer: KVQuantizer) -> PackedBlocks:
        """Quantize whole blocks."""

    def unpack(self, blocks: PackedBlocks, dtype: torch.dtype) -> torch.Tensor:
        """Dequantize blocks."""

    def attend(
        self, query: torch.Tensor, view: KVView, mask: torch.Tensor | None, scale: float, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention over packed and exact segments: the output and the log-sum-exp."""

    def dequantize(self, weight: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
        """Dequantize a weight."""

    def matmul(self, states: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        """Product with a packed weight."""


@dataclass(frozen=True)
class Verdict:
    """What one kernel answered to a request."""

    name: str
    supported: bool
    reason: str
    kernels: Kernels | None


REFERENCE = ReferenceKernels()


@functools.cache
def _load(name: str) -> Kernels:
    kernels: Kernels = registry.find(KernelSpec, name, "HFKV_KERNELS")
    return kernels


def explain(request: Request) -> list[Verdict]:
    """Every kernel's answer to a request, in order of preference; the first supported one runs."""
    found = registry.manager().specs(KernelSpec)
    forced = os.environ.get("HFKV_KERNELS", "")
    if forced and forced != REFERENCE.name and forced not in found:
        choices = ", ".join([REFERENCE.name, *sorted(found)])
        raise ValueError(f"HFKV_KERNELS={forced!r} is not installed. Choose from: {choices}.")
    verdicts = []
    for spec in sorted(found.values(), key=lambda spec: -spec.priority):
        if forced and forced != spec.name:
            verdicts.append(Verdict(spec.name, False, f"HFKV_KERNELS={forced}", None))
            continue
        try:
            kernels = _load(spec.name)
        # a shared library can fail in any way; one broken plugin must not take generation down
        except Exception as error:
            # a forced kernel that cannot load is the user's to fix; otherwise the reason is shown by `hfkv list`
            if forced:
                raise
            verdicts.append(Verdict(spec.name, False, f"{type(error).__name__}: {error}", None))
            continue
        if not hasattr(kernels, request.op):
            verdicts.append(Verdict(spec.name, False, f"has no {request.op}", None))
            continue
        verdicts.append(Verdict(spec.name, *kernels.supports(request), kernels))
    verdicts.append(Verdict(REFERENCE.name, *REFERENCE.supports(request), REFERENCE))
    return verdicts


@functools.cache
def select(request: Request) -> Kernels:
    """The kernels that run a request; decided once."""
    for verdict in explain(request):
        if verdict.supported and verdict.kernels is not None:
            return verdict.kernels
    raise AssertionError("the reference supports every request")


@functools.cache
def _attending(device: torch.device, dtype: torch.dtype, keys: PackedFormat, values: PackedFormat) -> Kernels:
    """The kernels that attend; every layer of every step asks, and a request takes longer to make than to look up."""
    return select(Request("attend", device.type, dtype, (keys, values)))


def forget_choices() -> None:
    """Decide anew: kernels were registered, or taken back."""
    _attending.cache_clear()
    select.cache_clear()
    _load.cache_clear()


def pack(states: torch.Tensor, format: PackedFormat, quantizer: KVQuantizer) -> PackedBlocks:
    """Quantize whole blocks (`ReferenceKernels.pack`)."""
    request = Request("pack", states.device.type, states.dtype, (format,), quantizer.name)
    return select(request).pack(states, format, quantizer)


def unpack(blocks: PackedBlocks, dtype: torch.dtype) -> torch.Tensor:
    """Dequantize blocks (`ReferenceKernels.unpack`)."""
    return select(Request("unpack", blocks.codes.device.type, dtype, (blocks.format,))).unpack(blocks, dtype)


def attend(
    query: torch.Tensor, view: KVView, mask: torch.Tensor | None = None, *, scale: float, causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over packed and exact segments (`ReferenceKernels.attend`)."""
    kernels = _attending(query.device, query.dtype, view.keys.format, view.values.format)
    return kernels.attend(query, view, mask, scale, causal)


def dequantize(weight: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Dequantize a weight (`ReferenceKernels.dequantize`)."""
    request = Request("dequantize", weight.codes.device.type, dtype, grid=weight.grid)
    return select(request).dequantize(weight, dtype)


def matmul(states: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """Product with a packed weight (`ReferenceKernels.matmul`)."""
    return select(Request("matmul", states.device.type, states.dtype, grid=weight.grid)).matmul(states, weight)
