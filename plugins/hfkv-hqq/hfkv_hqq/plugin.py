"""What this distribution adds to hfkv."""

from collections.abc import Iterator

import hfkv


@hfkv.hookimpl
def hfkv_kv_quantizers() -> Iterator[hfkv.KVQuantizerSpec]:
    """The quantizer "hqq"."""
    yield hfkv.KVQuantizerSpec(
        name="hqq",
        summary="HQQ's half-quadratic solver moves the offset of each group",
        load="hfkv_hqq.kv:HqqKVQuantizer",
        requires=("hqq>=0.2.8,<0.3",),
        # what transformers' "quantized" cache groups over with this backend
        axis_names={0: "channel", 1: "token"},
    )


@hfkv.hookimpl
def hfkv_weight_quantizers() -> Iterator[hfkv.WeightQuantizerSpec]:
    """The weight quantizer "hqq"."""
    yield hfkv.WeightQuantizerSpec(
        name="hqq",
        summary="HQQ's half-quadratic solver, without data: 1, 2, 3, 4 or 8 bits in groups",
        load="hfkv_hqq.weights:HqqLinear",
        requires=("hqq>=0.2.8,<0.3",),
        contract_options=tuple({"nbits": nbits, "group_size": 64} for nbits in (1, 2, 3, 4, 8)),
    )
