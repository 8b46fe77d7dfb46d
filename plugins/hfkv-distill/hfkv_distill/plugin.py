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
def hfkv_structures() -> Iterator[hfkv.StructureSpec]:
    """Models whose keys and values pass through latents, as `hfkv convert --latent-rank` makes them."""
    yield hfkv.StructureSpec(
        name="latent",
        summary="keys and values pass through a few latents, which any cache stores in their place",
        load="hfkv_distill.latent:restore",
        change="hfkv_distill.conversions.latents:compress_latents",
    )


@hfkv.hookimpl
def hfkv_subcommands() -> Iterator[hfkv.SubcommandSpec]:
    """The subcommands, in alphabetical order."""
    yield hfkv.SubcommandSpec(
        name="convert",
        summary="make a model smaller: fewer layers or KV heads, narrower, windows, latents, shared keys and values",
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
