"""``hfkv bench``: times and bytes of caches on a model, against transformers' own."""

from __future__ import annotations

from typing import Annotated

import typer

from hfkv import registry
from hfkv.specs import CacheSpec

from . import output
from .options import AsJson, Caches, Device, DType, DTypeOption, GGUFFile, Model, Report, settings

CONTEXTS = (512, 1536)
BATCHES = (1, 2, 4)


def main(
    model: Model,
    cache: Caches = None,
    context: Annotated[
        list[int] | None,
        typer.Option(metavar="N", min=2, help=f"Tokens of a prompt; may be repeated. {', '.join(map(str, CONTEXTS))}."),
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(metavar="N", min=1, help=f"Rows of a batch; may be repeated. {', '.join(map(str, BATCHES))}."),
    ] = None,
    new_tokens: Annotated[int, typer.Option(metavar="N", min=3, help="Tokens to generate in each run.")] = 16,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="How often each run is repeated.")] = 3,
    gguf_file: GGUFFile = None,
    dtype: DTypeOption = DType.FLOAT32,
    device: Device = "cpu",
    as_json: AsJson = False,
    report: Report = None,
) -> None:
    """Time to first token, tokens/s, stored and peak bytes of caches at several contexts and batch sizes, in turns."""
    output.check_report(report)
    out = output.console(as_json)
    contexts = sorted(set(context or CONTEXTS))
    batches = sorted(set(batch or BATCHES))
    from hfkv.cli.console import working

    with working(out, "importing torch and transformers"):
        from hfkv.cli import comparison
        from hfkv.cli.settings import PLAIN

        from . import bench_page
        from .bench import Load, bench, default_settings
        from .progress import steps
    if cache:
        chosen = settings(cache)
        # the plain cache is what the others are compared with
        chosen = [PLAIN, *(setting for setting in chosen if setting != PLAIN)]
    else:
        chosen = default_settings("kivi" in registry.manager().specs(CacheSpec))
    loaded, tokenizer, name = comparison.load(out, model, gguf_file, dtype.value, device)
    rows = max(batches)
    flat = comparison.encode(tokenizer, loaded, None, max(contexts), new_tokens)
    if flat.shape[1] < max(contexts):
        raise ValueError(f"--context {max(contexts)}: the built-in text has {flat.shape[1]:,} tokens")
    # every row begins elsewhere, so that no two are alike
    prompts = flat.repeat(rows, 1)
    for row in range(rows):
        prompts[row] = flat[0].roll(-row)
    loads = [Load(batches[0], length, new_tokens) for length in contexts]
    loads += [Load(size, contexts[0], new_tokens) for size in batches[1:]]
    with steps(out, len(chosen) * len(loads) * rounds) as bar:
        found = bench(
            loaded, prompts, chosen, loads, rounds, lambda text: bar.done() if text is None else bar.step(text)
        )
    import torch

    facts = {
        "model": f"{name}, {str(loaded.dtype).removeprefix('torch.')}, {loaded.device.type}",
        "threads": f"{torch.get_num_threads()}",
        "runs": f"{new_tokens} new tokens each, {rounds} rounds",
    }
    page = bench_page.page(f"Bench of {name}", facts, found, contexts, batches)
    output.finish(out, page, as_json=as_json, report=report)
