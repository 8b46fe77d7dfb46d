"""What this distribution adds to hfkv."""

from collections.abc import Iterator

import hfkv


@hfkv.hookimpl
def hfkv_trainers() -> Iterator[hfkv.TrainerSpec]:
    """The trainers."""
    yield hfkv.TrainerSpec(
        name="distill",
        summary="a transformers Trainer whose loss is what a teacher says, token by token",
        load="hfkv_distill.trainer:DistillationTrainer",
    )


@hfkv.hookimpl
def hfkv_subcommands() -> Iterator[hfkv.SubcommandSpec]:
    """The subcommands, in alphabetical order."""
    yield hfkv.SubcommandSpec(
        name="convert",
        summary="make a model smaller: fewer layers, narrower ones, fewer KV heads, windows, shared keys and values",
        load="hfkv_distill.convert_command:main",
    )
    yield hfkv.SubcommandSpec(
        name="distill",
        summary="train a student towards its teacher: loss, KL and perplexity, before and after",
        load="hfkv_distill.distill_command:main",
    )
    yield hfkv.SubcommandSpec(
        name="distill-heads",
        summary="train Medusa or EAGLE heads that draft for a model, on what it thinks of a text",
        load="hfkv_distill.heads_command:main",
    )
