"""What this distribution adds to hfkv."""

from collections.abc import Iterator

import hfkv

# a text for the contracts, whose model has no tokenizer
_IDS = [[1, 7, 3, 44, 12, 30, 8, 59, 2, 21, 5, 16, 33, 40, 63, 9], [4, 4, 18, 27, 50, 61, 13, 29, 6, 35, 11, 52, 3, 0]]


@hfkv.hookimpl
def hfkv_weight_quantizers() -> Iterator[hfkv.WeightQuantizerSpec]:
    """The weight quantizer "awq"."""
    yield hfkv.WeightQuantizerSpec(
        name="awq",
        summary="activation-aware: channels scaled and ranges clipped for a calibration text, then any grid of rtn",
        load="hfkv_awq.linear:AwqLinear",
        contract_options=(
            {"nbits": 4, "group_size": 64, "calibration_ids": _IDS},
            {"nbits": 3, "symmetric": True, "clip": False, "calibration_ids": _IDS},
            {"nbits": 4, "outlier_features": 2, "calibration_ids": _IDS},
            {"nbits": 4, "fold": False, "calibration_ids": _IDS},
            {"nbits": 3, "fold": False, "outlier_features": 2, "calibration_ids": _IDS},
        ),
    )
