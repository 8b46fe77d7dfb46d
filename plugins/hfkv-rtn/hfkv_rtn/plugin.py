"""What this distribution adds to hfkv."""

from collections.abc import Iterator

import hfkv


@hfkv.hookimpl
def hfkv_weight_quantizers() -> Iterator[hfkv.WeightQuantizerSpec]:
    """The weight quantizer "rtn"."""
    yield hfkv.WeightQuantizerSpec(
        name="rtn",
        summary="round to nearest: 2, 3, 4 or 8 bits or nf4, per tensor, row or group, symmetric or affine",
        load="hfkv_rtn.linear:RtnLinear",
        contract_options=(
            {"nbits": 8, "granularity": "row"},
            {"nbits": 8, "symmetric": False},
            {"nbits": 4, "group_size": 32},
            {"nbits": 4, "granularity": "tensor"},
            {"nbits": 3, "symmetric": False, "group_size": 64},
            {"nbits": 2, "symmetric": False, "group_size": 16},
            {"quant_type": "nf4"},
        ),
    )
