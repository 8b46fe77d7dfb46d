"""What this distribution adds to hfkv."""

from collections.abc import Iterator

import hfkv


@hfkv.hookimpl
def hfkv_weight_quantizers() -> Iterator[hfkv.WeightQuantizerSpec]:
    """The weight quantizer "bnb"."""
    yield hfkv.WeightQuantizerSpec(
        name="bnb",
        summary="bitsandbytes: LLM.int8 with outlier features in 16 bits, nf4 and fp4, double quantization",
        load="hfkv_bnb.linear:BnbLinear",
        requires=("bitsandbytes>=0.49,<0.51",),
        contract_options=(
            {"nbits": 8},
            {"nbits": 4},
            {"quant_type": "fp4"},
            {"nbits": 4, "double_quant": True},
        ),
    )
