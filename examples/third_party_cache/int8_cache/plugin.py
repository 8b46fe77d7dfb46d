"""What this distribution adds; nothing heavy is imported here."""

import hfkv


@hfkv.hookimpl
def hfkv_caches():
    """Name the cache, say where its layer is, what it cannot do, and how it is to be tested."""
    yield hfkv.CacheSpec(
        name="int8",
        summary="8-bit integers, one scale per token",
        load="int8_cache.layer:Int8Layer",
        offload=False,
        contract_options={"scale_dtype": "bfloat16"},
    )
