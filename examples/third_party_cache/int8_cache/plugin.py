"""What this distribution adds; nothing heavy is imported here."""

import hfkv


@hfkv.hookimpl
def hfkv_caches():
    """Name the cache, and say where its layer is and what it cannot do."""
    yield hfkv.CacheSpec(
        name="int8",
        summary="8-bit integers, one scale per token",
        load="int8_cache.layer:Int8Layer",
        offload=False,
    )
