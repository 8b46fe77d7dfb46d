"""What this distribution adds to hfkv."""

from collections.abc import Iterator

import hfkv


@hfkv.hookimpl
def hfkv_kv_quantizers() -> Iterator[hfkv.KVQuantizerSpec]:
    """The quantizer "quanto"."""
    yield hfkv.KVQuantizerSpec(
        name="quanto",
        summary="optimum-quanto: min-max at 2 and 4 bits, symmetric at 8",
        load="hfkv_quanto.kv:QuantoKVQuantizer",
        requires=("optimum-quanto>=0.2.7",),
        nbits=(2, 4, 8),
        # what transformers' "quantized" cache groups over with this backend
        axis_names={0: "token", -1: "channel"},
    )


@hfkv.hookimpl
def hfkv_weight_quantizers() -> Iterator[hfkv.WeightQuantizerSpec]:
    """The weight quantizer "quanto"."""
    yield hfkv.WeightQuantizerSpec(
        name="quanto",
        summary="optimum-quanto's int8, int4, int2 and float8",
        load="hfkv_quanto.weights:QuantoLinear",
        requires=("optimum-quanto>=0.2.7,<0.3",),
        contract_options=(
            {"nbits": 8},
            {"nbits": 8, "quant_type": "float8"},
            {"nbits": 4, "group_size": 64},
            {"nbits": 2},
        ),
    )
