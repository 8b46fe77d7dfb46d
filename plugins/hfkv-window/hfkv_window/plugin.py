"""What this distribution adds to hfkv."""

from collections.abc import Iterator

import hfkv


@hfkv.hookimpl
def hfkv_caches() -> Iterator[hfkv.CacheSpec]:
    """The caches "sink" and "window"."""
    yield hfkv.CacheSpec(
        name="sink",
        summary="the first tokens (attention sinks) and the newest ones; the rest is freed, endless decoding",
        load="hfkv_window.layer:SinkLayer",
        contract_options={"window_length": 11, "sink_length": 3},
        contract_model_options={"t5": {"positions": "absolute"}},
        contract_tolerance=0.01,
    )
    yield hfkv.CacheSpec(
        name="window",
        summary="the newest tokens alone; the rest is freed",
        load="hfkv_window.layer:WindowLayer",
        contract_options={"window_length": 13},
        contract_tolerance=0.01,
    )
