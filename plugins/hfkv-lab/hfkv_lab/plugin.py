"""What this distribution adds to hfkv."""

from collections.abc import Iterator

import hfkv


@hfkv.hookimpl
def hfkv_subcommands() -> Iterator[hfkv.SubcommandSpec]:
    """The subcommands of the laboratory, in alphabetical order."""
    yield hfkv.SubcommandSpec(
        name="eval",
        summary="what caches cost in quality, measured while decoding; the studies",
        load="hfkv_lab.eval:main",
    )
