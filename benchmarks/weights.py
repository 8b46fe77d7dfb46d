"""What quantized weights cost in quality, and what they bring in speed: a real model, backend by backend.

    HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 python benchmarks/weights.py
    HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 python benchmarks/weights.py --model gemma3-270m --json
    HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 python benchmarks/weights.py --weights rtn-nf4 --weights awq-int3:group_size=64

Three parts, each in a process of its own. ``quality``: the model in float32, one forward over a given text
(teacher-forced), against the model as it is; each quantized model is then saved in bfloat16, in shards that are moved.
``trip``: those are loaded, and compared with what was saved. ``speed``: they are loaded and saved again, and one token
is computed with no context, all in turns, with the head as it is.

A long table is made in pieces: ``--folder`` keeps the quantized models, ``--part`` measures one part of them, and
``--save`` puts what was found into a table that is there, in place of the same columns of the same rows::

    python benchmarks/weights.py --folder work --save table.json --part quality --weights rtn-nf4 --weights hqq-int4
    python benchmarks/weights.py --folder work --save table.json --part trip --weights rtn-nf4 --weights hqq-int4
    python benchmarks/weights.py --folder work --save table.json --part speed    # of all that the folder has
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from parts import PartTable, Run
from timing import in_turns, machine_line, processor, software
from transformers import AutoModelForCausalLM

import hfkv
from hfkv import kernels
from hfkv.cli.models import load_model
from hfkv.cli.prompts import long_text
from hfkv.cli.weights import parse_weights
from hfkv.weights import Grid, QuantizedLinear

WEIGHTS = [
    "rtn-int8:granularity=tensor",
    "rtn-int8:granularity=row",
    "quanto-int8",
    "quanto-float8",
    "bnb-int8",
    "hqq-int8",
    "rtn-int4:granularity=tensor",
    "rtn-int4:granularity=row",
    "rtn-int4",
    "rtn-int4:symmetric=False",
    "rtn-nf4",
    "bnb-nf4",
    "bnb-nf4:double_quant=True",
    "bnb-fp4",
    "quanto-int4",
    "hqq-int4",
    "awq-int4",
    "awq-int4:fold=False",
    "awq-int4:outlier_features=8",
    "rtn-int3:symmetric=False",
    "hqq-int3",
    "awq-int3",
    "awq-int3:fold=False",
    "rtn-int2:symmetric=False,group_size=64",
    "quanto-int2:group_size=64",
    "hqq-int2",
]
PLAIN = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# the text from this token on; a calibration reads the second half of the text, far behind it
START = 2_000
COLUMNS = {
    "weights": "Weights",
    "bits": "Bits per weight",
    "error": "Error, mean",
    "worst": "Error, worst",
    "perplexity": "Perplexity",
    "top1": "Top 1, %",
    "kl": "KL",
    "bfloat16": "Speed, × bfloat16",
    "float32": "× float32",
    "load": "Load, s",
    "save": "Save, s",
    "trip": "Round trip",
}

ABOUT = (
    "{name}, its output head left as it is. Quality: in float32, one forward over {tokens} tokens of CPython's help "
    "text from token {start:,} (teacher-forced). Error is |W - W'| / |W| of a matrix, its mean and the worst of all "
    "matrices; awq has none, since it scales the matrices before it rounds them. KL is from the unquantized model's "
    "next-token distribution, in nats; top 1 is how often the likeliest token is the same. awq was calibrated on 4,096 "
    "tokens of the second half of that text. Speed: one token with no context in bfloat16, as a ratio of medians of "
    "calls in turns. Load and save: once each, on the local disk. Round trip is a logit's largest difference after "
    "saving in shards of 30 MB, moving the folder and loading it, in another process (-: not measured). {machines}"
)
MODELS = {"smollm2": "SmolLM2-135M-Instruct", "gemma3-270m": "Gemma-3-270M"}


def text_ids(tokenizer: Any, tokens: int) -> torch.Tensor:
    """``[1, tokens]``, after the token that begins every text, where the tokenizer puts one there."""
    ids = tokenizer(long_text()[: 20 * (START + tokens)], add_special_tokens=False).input_ids
    begin = [token for token in tokenizer("a").input_ids[:1] if token == tokenizer.bos_token_id]
    return torch.tensor([begin + ids[START : START + tokens]])


@torch.no_grad()
def log_probabilities(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """``[tokens, vocabulary]`` float32."""
    return model(ids, use_cache=False).logits[0].float().log_softmax(-1)


def relative_errors(plain: Any, model: Any) -> Iterator[float]:
    """``|W - W'| / |W|`` of each quantized matrix."""
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            weight = plain.get_submodule(name).weight.detach()
            yield ((module.decode(torch.float32) - weight).norm() / weight.norm()).item()


Found = Iterator[tuple[str, dict[str, Any]]]


def quality(arguments: argparse.Namespace) -> Found:
    """Quantize, measure and save."""
    plain, tokenizer = load_model(arguments.model)
    ids = text_ids(tokenizer, arguments.tokens)
    expected = log_probabilities(plain, ids)
    yield "float32", {"bits": 32, "perplexity": perplexity(expected, ids)}
    yield "bfloat16", {"bits": 16}
    for text in arguments.weights:
        setting = parse_weights(text)
        if setting.backend == "awq":
            setting.options["calibration_text"] = long_text()[len(long_text()) // 2 :]
        model = hfkv.quantize_weights(load_model(arguments.model)[0], setting.config(tokenizer))
        actual = log_probabilities(model, ids)
        # awq scales the matrices before it rounds them: they are not those of the plain model
        errors = [] if setting.backend == "awq" else list(relative_errors(plain, model))
        found = {
            "bits": hfkv.describe(model).bits_per_weight,
            "error": sum(errors) / len(errors) if errors else None,
            "worst": max(errors, default=None),
            "perplexity": perplexity(actual, ids),
            "top1": 100 * (expected.argmax(-1) == actual.argmax(-1)).float().mean().item(),
            "kl": (expected.exp() * (expected - actual)).sum(-1).mean().item(),
        }
        keep(model.to(torch.bfloat16), ids, place(arguments, text))
        yield text, found


def place(arguments: argparse.Namespace, text: str) -> Path:
    """Where a quantized model is."""
    return arguments.folder / text.replace(":", "_")


def model_folder(arguments: argparse.Namespace, text: str) -> Path:
    """What was saved of it, and moved."""
    return place(arguments, text) / "moved"


@torch.no_grad()
def some_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """``[1, tokens, vocabulary]``: of a short prompt, and of a token alone, which takes the way of decoding."""
    parts = [model(ids[:, :24], use_cache=False).logits, model(ids[:, :1], use_cache=False).logits]
    return torch.cat(parts, dim=1)


def keep(model: Any, ids: torch.Tensor, folder: Path) -> None:
    """Save a model in shards, move them, and write down what it computes."""
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder / "saved", max_shard_size="30MB")
    (folder / "saved").rename(folder / "moved")
    torch.save({"ids": ids[:, :24], "logits": some_logits(model, ids)}, folder / "logits.pt")


def trip(arguments: argparse.Namespace) -> Found:
    """Load what was saved and moved, and compare what it computes."""
    for text in arguments.weights:
        model = AutoModelForCausalLM.from_pretrained(model_folder(arguments, text))
        before = torch.load(place(arguments, text) / "logits.pt")
        # as it was saved: rotary frequencies, which no file holds, were in bfloat16 too
        model.to(torch.bfloat16)
        yield text, {"trip": (some_logits(model, before["ids"]) - before["logits"]).abs().max().item()}


def perplexity(predicted: torch.Tensor, ids: torch.Tensor) -> float:
    """Of the text that the log-probabilities ``[tokens, vocabulary]`` were predicted for."""
    return predicted[:-1].gather(1, ids[0, 1:, None]).mean().neg().exp().item()


def decoder(model: Any) -> Any:
    """A call that computes one token, with no cache: the linear layers are nearly all of it."""
    ids = torch.ones(1, 1, dtype=torch.long)

    @torch.no_grad()
    def run() -> None:
        model(ids, use_cache=False)

    return run


def speed(arguments: argparse.Namespace) -> Found:
    """Load and save what was saved, and time it beside the plain model."""
    models = {name: load_model(arguments.model, dtype)[0] for name, dtype in PLAIN.items()}
    calls = {name: decoder(model) for name, model in models.items()}
    files: dict[str, dict[str, float]] = {}
    for text in arguments.weights:
        start = time.perf_counter()
        model = AutoModelForCausalLM.from_pretrained(model_folder(arguments, text))
        loaded = time.perf_counter()
        model.save_pretrained(place(arguments, text) / "again")
        files[text] = {"load": loaded - start, "save": time.perf_counter() - loaded}
        shutil.rmtree(place(arguments, text) / "again")
        model.to(torch.bfloat16)
        # one copy in memory of what is the same in all
        model.set_input_embeddings(models["bfloat16"].get_input_embeddings())
        model.set_output_embeddings(models["bfloat16"].get_output_embeddings())
        calls[text] = decoder(model)
    seconds = in_turns(calls, arguments.repeats)
    for name in calls:
        rates = {plain: round(seconds[plain] / seconds[name], 2) for plain in PLAIN}
        yield name, {**rates, **files.get(name, {})}


PARTS: dict[str, Callable[[argparse.Namespace], Found]] = {"quality": quality, "trip": trip, "speed": speed}


def run_of(part: str, arguments: argparse.Namespace) -> Run:
    """What the figures of a part depend on."""
    versions = {"torch": torch.__version__.partition("+")[0], "transformers": transformers.__version__}
    if part == "speed":
        grid = Grid(4, 128)
        product = kernels.select(kernels.Request("matmul", "cpu", torch.bfloat16, grid=grid)).name
        options = {"repeats": arguments.repeats, "OMP_NUM_THREADS": torch.get_num_threads()}
        return Run(part, f"{machine_line()}, kernels {product!r}", versions, options)
    options = {"tokens": arguments.tokens} if part == "quality" else {}
    return Run(part, f"{processor()}; {software()}", versions, options)


def measure(part: str, arguments: argparse.Namespace, table: PartTable) -> None:
    """Measure a part, and save the table after each row."""
    missing = [text for text in arguments.weights if part != "quality" and not model_folder(arguments, text).exists()]
    if missing:
        raise ValueError(f"{arguments.folder} has no {missing[0]}. Fix: first --part quality --weights {missing[0]}")
    run = run_of(part, arguments)
    table.check(run, [*PLAIN, *map(row_name, arguments.weights)])
    for name, found in PARTS[part](arguments):
        table.put(run, row_name(name), {column: digits(value) for column, value in found.items()})
        save(table, arguments)
        # stdout is the table's
        print(part, name, json.dumps(found), file=sys.stderr, flush=True)


def row_name(name: str) -> str:
    """How the table names a setting."""
    return name if name in PLAIN else f"`{name}`"


def save(table: PartTable, arguments: argparse.Namespace) -> dict[str, Any]:
    """Write the table as the documentation keeps it."""
    name = MODELS.get(arguments.model, arguments.model)
    settings = [row.strip("`") for row in table.names if row not in PLAIN]
    tokens = table.options("quality").get("tokens", arguments.tokens)
    return table.save(
        title=f"Quantized weights of {name}",
        plugins=sorted({parse_weights(text).backend for text in settings}),
        about=ABOUT.format(name=name, tokens=tokens, start=START, machines=table.machines()),
        command=command(arguments, settings, {**table.options("quality"), **table.options("speed")}),
    )


def command(arguments: argparse.Namespace, settings: Sequence[str], options: dict[str, Any]) -> str:
    """What measures the whole table at once."""
    threads = options.pop("OMP_NUM_THREADS", torch.get_num_threads())
    result = f"HF_HUB_OFFLINE=1 OMP_NUM_THREADS={threads} python benchmarks/weights.py --model {arguments.model}"
    result += "".join(f" --{name} {value}" for name, value in options.items())
    return result + ("" if list(settings) == WEIGHTS else "".join(f" --weights {text}" for text in settings))


def digits(value: Any) -> Any:
    """Four that count."""
    return value if isinstance(value, int) else "-" if value is None else float(f"{value:.4g}")


def show(found: dict[str, Any]) -> None:
    """Print the table."""
    print(found["about"], "", sep="\n")
    rows = [list(found["columns"].values())]
    rows += [[str(row[name]).strip("`") for name in found["columns"]] for row in found["rows"]]
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def parsed(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--weights", action="append", metavar="NAME-TYPE:OPTION=VALUE,...", help="repeatable")
    parser.add_argument("--tokens", type=int, default=512, help="of the text")
    parser.add_argument("--repeats", type=int, default=11, help="timings of each setting")
    parser.add_argument("--folder", type=Path, help="for the quantized models; by default they are not kept")
    parser.add_argument("--part", choices=tuple(PARTS), help="one part, with --folder; by default all")
    parser.add_argument("--save", type=Path, help="write what is found into the table in this file")
    parser.add_argument("--json", action="store_true", help="print the table as docs/benchmarks has it")
    arguments = parser.parse_args(given)
    if arguments.part and arguments.folder is None:
        parser.error("--part works on what is in a folder: add --folder")
    if arguments.weights is None:
        made = arguments.part in ("trip", "speed")
        arguments.weights = [text for text in WEIGHTS if not made or model_folder(arguments, text).exists()]
    if not arguments.weights:
        parser.error(f"{arguments.folder} has none of the settings: first --part quality")
    for text in arguments.weights:
        parse_weights(text)
    return arguments


def main(given: Sequence[str] | None = None) -> None:
    """Measure, and print the table or its JSON."""
    arguments = parsed(given)
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        arguments.folder = arguments.folder or Path(temporary)
        arguments.save = arguments.save or Path(temporary, "table.json")
        table = PartTable(arguments.save, "weights", COLUMNS, [*PLAIN, *map(row_name, WEIGHTS)])
        if arguments.part:
            measure(arguments.part, arguments, table)
            found = save(table, arguments)
        else:
            again = ["--folder", str(arguments.folder), "--save", str(arguments.save)]
            for part in PARTS:
                words = [*(sys.argv[1:] if given is None else given), *again, "--part", part]
                subprocess.run([sys.executable, __file__, *words], check=True, stdout=subprocess.DEVNULL)
            found = json.loads(arguments.save.read_text(encoding="utf-8"))
    if arguments.json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        show(found)


if __name__ == "__main__":
    main()
