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
    yield hfkv.SubcommandSpec(
        name="plan",
        summary="what fits on a card: weights, caches, users and context, by arithmetic alone",
        load="hfkv_lab.plan_command:main",
    )
