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
