"""Round to nearest: the grid spans a group's minimum and maximum."""

from __future__ import annotations

import torch

from hfkv.cache import KVQuantizer, round_to_grid


class RoundToNearest(KVQuantizer):
    """Asymmetric min-max quantization.

    Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", 2024.
    """

    name = "rtn"

    def quantize(self, groups: torch.Tensor, nbits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes, scale and offset of each group."""
        # two passes: on CPU aminmax along a short dimension takes longer than both
        low, high = groups.amin(dim=-1), groups.amax(dim=-1)
        return round_to_grid(groups, (high - low) / (2**nbits - 1), low, nbits)
