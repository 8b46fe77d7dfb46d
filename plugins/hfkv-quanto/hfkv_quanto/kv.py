"""The optimizers of optimum-quanto decide scale and offset."""

from __future__ import annotations

import torch
from optimum.quanto import AbsmaxOptimizer, MaxOptimizer, qint2, qint4, qint8  # type: ignore[import-untyped]

from hfkv.cache import KVQuantizer, round_to_grid

QTYPES = {2: qint2, 4: qint4, 8: qint8}


class QuantoKVQuantizer(KVQuantizer):
    """What optimum-quanto does with a type of each width.

    ``qint2`` and ``qint4`` have a scale and a shift, found by `MaxOptimizer`, which transformers' "quantized" cache
    uses too. ``qint8`` is symmetric: `AbsmaxOptimizer` finds the scale, and codes stand for -128 to 127.
    """

    name = "quanto"

    def quantize(self, groups: torch.Tensor, nbits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes, scale and offset of each group."""
        qtype = QTYPES[nbits]
        rows = groups.flatten(0, -2)
        # optimize(), not the optimizer itself: that one takes a single row for one group per column
        if nbits == 8:
            scale = AbsmaxOptimizer().optimize(rows, qtype, axis=0)
            offset = scale * qtype.qmin
        else:
            scale, shift = MaxOptimizer().optimize(rows, qtype, axis=0)
            offset = -shift
        shape = groups.shape[:-1]
        return round_to_grid(groups, scale.view(shape), offset.view(shape), nbits)
