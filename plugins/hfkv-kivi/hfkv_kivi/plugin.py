"""What this distribution adds to hfkv."""

from collections.abc import Iterator

import hfkv


@hfkv.hookimpl
def hfkv_caches() -> Iterator[hfkv.CacheSpec]:
    """The cache "kivi"."""
    yield hfkv.CacheSpec(
        name="kivi",
        summary="quantized once: keys per channel, values per token; sinks and newest tokens in full precision",
        load="hfkv_kivi.layer:KiviLayer",
        contract_options={"nbits": 8, "group_size": 8, "residual_length": 8, "sink_length": 2},
        contract_tolerance=0.2,
    )


@hfkv.hookimpl
def hfkv_kv_quantizers() -> Iterator[hfkv.KVQuantizerSpec]:
    """The quantizer "rtn"."""
    yield hfkv.KVQuantizerSpec(
        name="rtn",
        summary="round to nearest between a group's minimum and maximum",
        load="hfkv_kivi.rtn:RoundToNearest",
    )
