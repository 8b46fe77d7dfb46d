"""What tests of kernels share: blocks packed by the reference, and fresh allocations that are poisoned."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..cache import KVQuantizer, PackedBlocks, PackedFormat, PackedStore, round_to_grid
from ..kernels import REFERENCE


class RoundToNearest(KVQuantizer):
    """Round to nearest between the minimum and the maximum, as the op ``pack`` does it for this name."""

    name = "rtn"

    def quantize(self, groups: torch.Tensor, nbits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes, scale and offset of each group."""
        low, high = groups.aminmax(dim=-1)
        return round_to_grid(groups, (high - low) / (2**nbits - 1), low, nbits)


class Nearest(KVQuantizer):
    """The nearest level of a codebook."""

    name = "book"

    def __init__(self, levels: tuple[float, ...]) -> None:
        self.levels = torch.tensor(levels)

    def quantize(self, groups: torch.Tensor, nbits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes, scale and offset of each group."""
        scale = groups.abs().amax(-1).half()
        distance = (groups.unsqueeze(-1) / scale.float()[..., None, None] - self.levels.to(groups.device)).abs()
        return distance.argmin(-1).to(torch.uint8), scale, torch.zeros_like(scale)


def make_blocks(states: torch.Tensor, format: PackedFormat, grown: bool = False) -> PackedBlocks:
    """Packed by the reference; ``grown`` gives a view of a store with room for more."""
    quantizer = RoundToNearest() if format.codebook is None else Nearest(format.codebook)
    blocks = REFERENCE.pack(states, format, quantizer)
    if not grown:
        return blocks
    store = PackedStore(format, states.shape[0], states.shape[1], states.device)
    for block in range(blocks.count):
        store.extend(blocks.narrow(block, 1))
    return store.view()


class _Poison(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "empty" in func.__name__:
            result.fill_(torch.nan if result.is_floating_point() else torch.iinfo(result.dtype).max)
        return result


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fill what ``torch.empty`` and its relatives return with NaN (the largest number where it is an integer)."""
    with _Poison():
        yield
