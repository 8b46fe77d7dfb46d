"""What quantized weights cost in quality, and what they bring in speed: a real model, backend by backend.

    HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 python benchmarks/weights.py
    HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 python benchmarks/weights.py --model gemma3-270m --json
    HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 python benchmarks/weights.py --weights rtn-nf4 --weights awq-int3:group_size=64

Quality: the model in float32, one forward over a given text (teacher-forced), against the model as it is. Each
quantized model is then saved in bfloat16. Speed: those are loaded, compared with what was saved, and saved again; and
one token is computed with no context, all in turns, with the head as it is. ``--folder`` keeps all that, so that
``--part speed`` can be another process and wait for a quiet machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from timing import in_turns, machine_line
from transformers import AutoModelForCausalLM

import hfkv
from hfkv.cli.models import load_model
from hfkv.cli.prompts import long_text
from hfkv.cli.weights import parse_weights
from hfkv.weights import QuantizedLinear

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
    "awq-int4:outlier_features=8",
    "rtn-int3:symmetric=False",
    "hqq-int3",
    "awq-int3",
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
    "saving in shards of 30 MB, moving the folder and loading it, in another process. On {machine}."
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


def relative_errors(plain: Any, model: Any) -> dict[str, float]:
    """``|W - W'| / |W|`` of each quantized matrix."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            weight = plain.get_submodule(name).weight.detach()
            found[name] = ((module.decode(torch.float32) - weight).norm() / weight.norm()).item()
    return found


def measure_quality(arguments: argparse.Namespace, folder: Path) -> None:
    """Quantize, measure and save every setting that the folder does not have."""
    plain, tokenizer = load_model(arguments.model)
    ids = text_ids(tokenizer, arguments.tokens)
    expected = log_probabilities(plain, ids)
    record(folder / "plain", {"perplexity": perplexity(expected, ids), "tokens": arguments.tokens})
    for text in arguments.weights:
        place = folder / text.replace(":", "_")
        if (place / "quality.json").exists():
            continue
        setting = parse_weights(text)
        if setting.backend == "awq":
            setting.options["calibration_text"] = long_text()[len(long_text()) // 2 :]
        start = time.perf_counter()
        model = hfkv.quantize_weights(load_model(arguments.model)[0], setting.config(tokenizer))
        seconds = time.perf_counter() - start
        actual = log_probabilities(model, ids)
        # awq scales the matrices before it rounds them: they are not those of the plain model
        errors = {} if setting.backend == "awq" else relative_errors(plain, model)
        found = {
            "bits": hfkv.describe(model).bits_per_weight,
            "error": sum(errors.values()) / len(errors) if errors else None,
            "worst": max(errors.values(), default=None),
            "worst_matrix": max(errors, key=lambda name: errors[name], default=None),
            "perplexity": perplexity(actual, ids),
            "top1": 100 * (expected.argmax(-1) == actual.argmax(-1)).float().mean().item(),
            "kl": (expected.exp() * (expected - actual)).sum(-1).mean().item(),
            "quantizing": seconds,
        }
        keep(model.to(torch.bfloat16), ids, place)
        record(place, found)
        # stdout is the table's
        print(text, json.dumps(found), file=sys.stderr, flush=True)


@torch.no_grad()
def some_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """``[1, tokens, vocabulary]``: of a short prompt, and of a token alone, which takes the way of decoding."""
    parts = [model(ids[:, :24], use_cache=False).logits, model(ids[:, :1], use_cache=False).logits]
    return torch.cat(parts, dim=1)


def keep(model: Any, ids: torch.Tensor, place: Path) -> None:
    """Save a model in shards, move them, and write down what it computes."""
    shutil.rmtree(place, ignore_errors=True)
    model.save_pretrained(place / "saved", max_shard_size="30MB")
    (place / "saved").rename(place / "moved")
    torch.save({"ids": ids[:, :24], "logits": some_logits(model, ids)}, place / "logits.pt")


def perplexity(predicted: torch.Tensor, ids: torch.Tensor) -> float:
    """Of the text that the log-probabilities ``[tokens, vocabulary]`` were predicted for."""
    return predicted[:-1].gather(1, ids[0, 1:, None]).mean().neg().exp().item()


def record(place: Path, found: dict[str, Any], name: str = "quality.json") -> None:
    """Write what was measured."""
    place.mkdir(parents=True, exist_ok=True)
    (place / name).write_text(json.dumps(found))


def decoder(model: Any) -> Any:
    """A call that computes one token, with no cache: the linear layers are nearly all of it."""
    ids = torch.ones(1, 1, dtype=torch.long)

    @torch.no_grad()
    def run() -> None:
        model(ids, use_cache=False)

    return run


def measure_speed(arguments: argparse.Namespace, folder: Path) -> None:
    """Load, save and time what is in the folder."""
    models = {name: load_model(arguments.model, dtype)[0] for name, dtype in PLAIN.items()}
    calls = {name: decoder(model) for name, model in models.items()}
    for text in arguments.weights:
        place = folder / text.replace(":", "_")
        start = time.perf_counter()
        model = AutoModelForCausalLM.from_pretrained(place / "moved")
        loaded = time.perf_counter()
        model.save_pretrained(place / "again")
        saved = time.perf_counter()
        shutil.rmtree(place / "again")
        before = torch.load(place / "logits.pt")
        # as it was saved: rotary frequencies, which no file holds, were in bfloat16 too
        model.to(torch.bfloat16)
        trip = (some_logits(model, before["ids"]) - before["logits"]).abs().max().item()
        record(place, {"load": loaded - start, "save": saved - loaded, "trip": trip}, "files.json")
        # one copy in memory of what is the same in all
        model.set_input_embeddings(models["bfloat16"].get_input_embeddings())
        model.set_output_embeddings(models["bfloat16"].get_output_embeddings())
        calls[text] = decoder(model)
    seconds = in_turns(calls, arguments.repeats)
    record(folder, {"machine": machine_line(), "seconds": seconds}, "speed.json")


def table(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The figures as the documentation keeps them."""
    speed = json.loads((folder / "speed.json").read_text())
    plain = json.loads((folder / "plain" / "quality.json").read_text())
    seconds = speed["seconds"]
    unknown = dict.fromkeys(COLUMNS, "-")
    of_plain = {"float32": {"bits": 32, "perplexity": digits(plain["perplexity"])}, "bfloat16": {"bits": 16}}
    rows = [{**unknown, "weights": name, **found, **rates(seconds, name)} for name, found in of_plain.items()]
    for text in arguments.weights:
        place = folder / text.replace(":", "_")
        found = {name: json.loads((place / f"{name}.json").read_text()) for name in ("quality", "files")}
        measured = {name: digits(value) for part in found.values() for name, value in part.items() if name in COLUMNS}
        rows.append({**measured, "weights": f"`{text}`", **rates(seconds, text)})
    name = MODELS.get(arguments.model, arguments.model)
    command = f"HF_HUB_OFFLINE=1 OMP_NUM_THREADS={torch.get_num_threads()} python benchmarks/weights.py"
    command += f" --model {arguments.model} --tokens {arguments.tokens} --repeats {arguments.repeats} --json"
    if arguments.weights != WEIGHTS:
        command += "".join(f" --weights {text}" for text in arguments.weights)
    return {
        "title": f"Quantized weights of {name}",
        "plugins": sorted({parse_weights(text).backend for text in arguments.weights}),
        "about": ABOUT.format(name=name, tokens=plain["tokens"], start=START, machine=speed["machine"]),
        "command": command,
        "versions": {"torch": torch.__version__.partition("+")[0], "transformers": transformers.__version__},
        "columns": COLUMNS,
        "rows": rows,
    }


def rates(seconds: dict[str, float], name: str) -> dict[str, float]:
    """How many times as many tokens in a second as the model as it is."""
    return {plain: round(seconds[plain] / seconds[name], 2) for plain in PLAIN}


def digits(value: Any) -> Any:
    """Four that count."""
    return "-" if value is None else float(f"{value:.4g}")


def show(found: dict[str, Any]) -> None:
    """Print the table."""
    print(found["about"], "", sep="\n")
    rows = [list(found["columns"].values())]
    rows += [[str(row[name]).strip("`") for name in found["columns"]] for row in found["rows"]]
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def main() -> None:
    """Measure, and print the table or its JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--weights", action="append", metavar="NAME-TYPE:OPTION=VALUE,...", help="repeatable")
    parser.add_argument("--tokens", type=int, default=512, help="of the text")
    parser.add_argument("--repeats", type=int, default=11, help="timings of each setting")
    parser.add_argument("--folder", type=Path, help="for what is quantized and measured; by default it is not kept")
    parser.add_argument("--part", choices=("quality", "speed", "table"), help="one part, with --folder; by default all")
    parser.add_argument("--json", action="store_true", help="the table as docs/benchmarks has it")
    arguments = parser.parse_args()
    if arguments.part and arguments.folder is None:
        parser.error("--part works on what is in a folder: add --folder")
    arguments.weights = arguments.weights or WEIGHTS
    transformers.logging.disable_progress_bar()
    with contextlib.ExitStack() as stack:
        folder = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        if arguments.part in (None, "quality"):
            measure_quality(arguments, folder)
        if arguments.part in (None, "speed"):
            measure_speed(arguments, folder)
        if arguments.part in (None, "table"):
            found = table(arguments, folder)
            if arguments.json:
                print(json.dumps(found, indent=2, ensure_ascii=False))
            else:
                show(found)


if __name__ == "__main__":
    main()
