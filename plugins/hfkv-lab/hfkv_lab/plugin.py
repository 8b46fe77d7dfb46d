"""What this distribution adds to hfkv."""

from collections.abc import Iterator

import hfkv


@hfkv.hookimpl
def hfkv_subcommands() -> Iterator[hfkv.SubcommandSpec]:
    """The subcommands of the laboratory, in alphabetical order."""
    yield hfkv.SubcommandSpec(
        name="bench",
        summary="time to first token, tokens/s, stored and peak bytes, against transformers' own caches",
        load="hfkv_lab.bench_command:main",
    )
    yield hfkv.SubcommandSpec(
        name="eval",
        summary="what caches cost in quality, measured while decoding; the studies",
        load="hfkv_lab.eval_command:main",
    )
    yield hfkv.SubcommandSpec(
        name="inspect",
        summary="what keys, values, attention and weights look like; which cache options they ask for",
        load="hfkv_lab.inspect_command:main",
    )
    yield hfkv.SubcommandSpec(
        name="plan",
        summary="what fits on a card: weights, caches, users and context, by arithmetic alone",
        load="hfkv_lab.plan_command:main",
    )
    yield hfkv.SubcommandSpec(
        name="tune",
        summary="the cheapest setting of each layer within a quality budget",
        load="hfkv_lab.tune_command:main",
    )
