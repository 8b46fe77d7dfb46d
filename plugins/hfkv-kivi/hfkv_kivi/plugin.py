"""What this distribution adds to hfkv."""

from collections.abc import Iterator

import hfkv


@hfkv.hookimpl
def hfkv_caches() -> Iterator[hfkv.CacheSpec]:
    yield hfkv.CacheSpec(
        name="kivi",
        summary="quantized once: keys per channel, values per token; sinks and newest tokens in full precision",
        load="hfkv_kivi.layer:KiviLayer",
    )


@hfkv.hookimpl
def hfkv_kv_quantizers() -> Iterator[hfkv.KVQuantizerSpec]:
    yield hfkv.KVQuantizerSpec(
        name="rtn",
        summary="round to nearest between a group's minimum and maximum",
        load="hfkv_kivi.rtn:RoundToNearest",
    )
