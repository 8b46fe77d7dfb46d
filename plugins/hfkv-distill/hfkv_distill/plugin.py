"""What this distribution adds to hfkv."""

from collections.abc import Iterator

import hfkv


@hfkv.hookimpl
def hfkv_subcommands() -> Iterator[hfkv.SubcommandSpec]:
    """The subcommands, in alphabetical order."""
    yield from ()
