"""The whole check of hfkv-triton on one GPU, in minutes: is it right, and is it fast.

    python benchmarks/gpu.py --json gpu.json
    TRITON_INTERPRET=1 python benchmarks/gpu.py --smoke

Three parts: the machine, with its copy bandwidth; the ops against the reference on the device, `generate` on tiny
models and the conformance kit; one decode step of attention in Llama-3.1-8B's shape against torch's SDPA in bfloat16
and against what transformers' quantized cache does, dequantize and then SDPA. What is compared takes turns in one run.

A part that fails is reported, the others run, and the exit status is 1. ``--smoke`` has tiny sizes, also for the CPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

if "--smoke" in sys.argv:
    # before Triton is imported; a GPU, where there is one, is used all the same
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
import transformers

import hfkv
from hfkv.cache import KVView, PackedBlocks, PackedFormat
from hfkv.cache.memory import tensor_bytes

SINK, RESIDUAL = 4, 144
# query heads, KV heads and channels: Llama-3.1-8B's, and one that the interpreter can do
LLAMA, TINY = (32, 8, 128), (4, 1, 32)


class Run:
    """What was asked for, and what was found."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.smoke: bool = options.smoke
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.shape = TINY if self.smoke else LLAMA
        self.started = time.monotonic()
        self.seconds: float = options.seconds
        self.failures: list[str] = []
        self.report: dict[str, Any] = {"smoke": self.smoke, "checks": [], "rows": [], "skipped": []}

    def left(self) -> float:
        """Seconds of the budget that are left."""
        return self.seconds - (time.monotonic() - self.started)

    def fail(self, name: str, error: Exception) -> None:
        """Report and count a failure."""
        self.failures.append(name)
        self.report["checks"].append({"check": name, "error": f"{type(error).__name__}: {error}"})
        print(f"FAILED {name}: {type(error).__name__}: {error}", flush=True)
        if os.environ.get("HFKV_TRACE"):
            traceback.print_exception(error)

    def attempt(self, name: str, part: Callable[[], object]) -> None:
        """Run a part; what it raises is reported and counted, and the next one runs."""
        try:
            part()
        except KeyboardInterrupt:
            raise
        except Exception as error:
            self.fail(name, error)
        finally:
            if self.device == "cuda":
                torch.cuda.empty_cache()


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def in_turns(calls: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, dict[str, float]]:
    """Median, least and most seconds of each call, one after the other in every round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(_seconds(call))
    return {
        name: {"median": statistics.median(values), "least": min(values), "most": max(values)}
        for name, values in times.items()
    }


def _seconds(call: Callable[[], object]) -> float:
    if not torch.cuda.is_available():
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def machine(run: Run) -> None:
    """Print the machine, and measure what a copy reaches on it."""
    import triton

    name = "CPU, interpreted"
    if run.device == "cuda":
        name = torch.cuda.get_device_name()
        try:
            query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            driver = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.split("\n")[0].strip()
        except (OSError, subprocess.TimeoutExpired):
            driver = "unknown"
        name += f", driver {driver}, {torch.cuda.get_device_properties(0).total_memory / 2**30:.0f} GiB"
    versions = {"torch": torch.__version__, "triton": triton.__version__, "transformers": transformers.__version__}
    versions["hfkv"] = hfkv.__version__
    source = torch.ones(2**18 if run.smoke else 2**28, device=run.device)
    target = torch.empty_like(source)
    copy = in_turns({"copy": lambda: target.copy_(source)}, 3 if run.smoke else 11)["copy"]
    run.report |= {"machine": name, "versions": versions, "copy_bytes_per_second": 2 * source.nbytes / copy["median"]}
    print(name, *(f"{name} {version}" for name, version in versions.items()), sep=", ")
    print(f"copy bandwidth, read and written: {run.report['copy_bytes_per_second'] / 1e9:.1f} GB/s\n", flush=True)


def ops_against_reference(run: Run) -> None:
    """Compare every op with the reference over a grid of shapes, one report for each that differs."""
    from hfkv.kernels import REFERENCE
    from hfkv.testing.packing import RoundToNearest
    from hfkv_triton.kernels import kernels
    from hfkv_triton.testing import WIDTHS, check_attend, make_view

    dtypes = [torch.bfloat16, torch.float16, torch.float32]
    formats: Any = itertools.product(WIDTHS, dtypes, (64, 128, 80, 256), (32, 24), (1, 4, 16), (1, 5, 70))
    if run.smoke:
        formats = [(4, torch.float32, 32, 32, 4, 1), (3, torch.bfloat16, 20, 24, 1, 5)]
    count = 0

    def one(nbits: int, dtype: torch.dtype, head_dim: int, group_size: int, share: int, queries: int) -> None:
        sizes = {"blocks": 3, "exact": 9 + queries} if run.smoke else {"blocks": 61, "exact": 100 + queries}
        view = make_view(
            key_nbits=nbits, value_nbits=nbits, head_dim=head_dim, group_size=group_size, dtype=dtype,
            device=run.device, kv_heads=2, batch=2, **sizes,
        )  # fmt: skip
        query = torch.randn(2, 2 * share, queries, head_dim).to(run.device, dtype)
        check_attend(kernels, view, query, causal=True)
        mask = torch.rand(2, 1, queries, view.length, device=run.device) < 0.7
        check_attend(kernels, view, query, mask)
        for blocks in (view.keys, view.values):
            torch.testing.assert_close(
                kernels.unpack(blocks, torch.float32), REFERENCE.unpack(blocks, torch.float32), rtol=1e-5, atol=1e-5
            )
            states = torch.randn(1, 2, 3 * group_size, head_dim).to(run.device, dtype)
            found = kernels.pack(states, blocks.format, RoundToNearest())
            expected = REFERENCE.pack(states, blocks.format, RoundToNearest())
            for part in ("codes", "scale", "offset"):
                if not torch.equal(getattr(found, part), getattr(expected, part)):
                    raise AssertionError(f"pack: {part} differ from the reference")

    for case in formats:
        if run.left() < 0.6 * run.seconds:
            run.report["skipped"].append(f"ops: after {count} cases, for time")
            print(f"ops: the others are left out after {count} cases, for time")
            break
        count += 1
        label = "nbits {}, {}, head_dim {}, group {}, share {}, queries {}".format(*case)
        run.attempt(f"ops: {label}", lambda case=case: one(*case))
    run.report["checks"].append({"check": "ops against the reference", "cases": count})
    print(f"ops against the reference: {count} cases", flush=True)


def generate_on_device(run: Run) -> None:
    """Decode with an 8-bit cache on the device, and score what came out again with the plain model."""
    from hfkv import kernels
    from hfkv_triton.kernels import TritonKernels

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval().to(run.device)
    inputs = torch.randint(1, 64, (2, 60 if run.smoke else 500), device=run.device)
    new_tokens = 3 if run.smoke else 40
    request = kernels.Request(
        "attend", run.device, torch.float32, (PackedFormat(8, "channel", 16, 16), PackedFormat(8, "token", 16, 16))
    )
    if not isinstance(kernels.select(request), TritonKernels):
        raise AssertionError(f"the op table chose {kernels.select(request).name!r}")
    found = model.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=new_tokens, do_sample=False, eos_token_id=None,
        return_dict_in_generate=True, output_logits=True, cache_implementation="kivi",
        cache_config={"nbits": 8, "group_size": 16, "residual_length": 16},
    )  # fmt: skip
    with torch.no_grad():
        expected = model(found.sequences).logits[:, inputs.shape[1] - 1 : -1]
    error = ((torch.stack(found.logits, 1) - expected).norm() / expected.norm()).item()
    run.report["checks"].append({"check": "generate, re-scored by the plain model", "relative_error": error})
    print(f"generate, re-scored by the plain model: relative error {error:.1e}", flush=True)
    if not error < 0.02:
        raise AssertionError(f"relative error {error:.1e}")


def conformance(run: Run) -> None:
    """Run the conformance kit on the device, as far as the time goes."""
    arguments = ["-q", "-x", "-p", "no:cacheprovider", "--pyargs", "hfkv.testing.contracts", "--hfkv-plugin", "kivi"]
    if run.smoke:
        # in the interpreter it takes many minutes: only whether it can be asked for
        arguments += ["--collect-only"]
    # the kit makes its models with torch's default device
    code = f"import sys, torch, pytest; torch.set_default_device({run.device!r}); sys.exit(pytest.main(sys.argv[1:]))"
    limit = max(10.0, min(120.0, run.left() - 60))
    environment = {**os.environ, "HFKV_KERNELS": "triton", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=limit, env=environment
        )
    except subprocess.TimeoutExpired:
        run.report["skipped"].append(f"conformance kit: not done after {limit:.0f} s")
        print(f"conformance kit: not done after {limit:.0f} s, left out")
        return
    last = (done.stdout.strip().splitlines() or ["no output"])[-1]
    run.report["checks"].append({"check": "conformance kit", "result": last})
    print(f"conformance kit: {last}", flush=True)
    if done.returncode:
        raise AssertionError(f"{last}\n{done.stdout[-3000:]}{done.stderr[-1000:]}")


def random_blocks(format: PackedFormat, batch: int, kv_heads: int, tokens: int, device: str) -> PackedBlocks:
    """Blocks of random codes: what they stand for does not change the time."""
    blocks = PackedBlocks.empty(format, batch, kv_heads, tokens // format.block_length, device)
    blocks.codes.random_(0, 256)
    blocks.scale.uniform_(0.05, 0.1)
    blocks.offset.uniform_(-0.5, 0.0)
    return blocks


def packed_view(nbits: int, batch: int, tokens: int, shape: tuple[int, int, int], device: str) -> KVView:
    """A kivi cache of random numbers with its defaults: packed tokens, sinks and residual."""
    _, kv_heads, head_dim = shape
    exact = torch.randn(2, batch, kv_heads, SINK + RESIDUAL, head_dim, dtype=torch.bfloat16, device=device)
    packed = tokens - SINK - RESIDUAL
    formats = PackedFormat(nbits, "channel", 32, head_dim), PackedFormat(nbits, "token", 32, head_dim)
    return KVView.of(
        exact[0], exact[1], SINK, *(random_blocks(form, batch, kv_heads, packed, device) for form in formats)
    )


def view_bytes(view: KVView) -> int:
    """Bytes that a step has to read."""
    parts = [tensor for blocks in (view.keys, view.values) for tensor in (blocks.codes, blocks.scale, blocks.offset)]
    return sum(tensor.nbytes for tensor in (*parts, view.exact_keys, view.exact_values))


def sdpa(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One decode step of torch's own attention, the query heads of a KV head as its rows, as transformers has it."""
    batch, kv_heads = keys.shape[:2]
    rows = query.reshape(batch, kv_heads, -1, query.shape[-1])
    return torch.nn.functional.scaled_dot_product_attention(rows, keys, values, scale=query.shape[-1] ** -0.5)


def quanto_int4(tokens: int, batch: int, shape: tuple[int, int, int], device: str) -> list[Any]:
    """Keys and values as transformers' quantized cache stores them with the backend quanto at 4 bits."""
    from optimum.quanto import MaxOptimizer, qint4, quantize_weight

    stored = []
    for _ in range(2):
        states = torch.randn(batch, shape[1], tokens, shape[2], dtype=torch.bfloat16, device=device)
        scale, zero = MaxOptimizer()(states, qint4, 0, 64)
        stored.append(quantize_weight(states, qint4, 0, scale, zero, 64))
        del states
    return stored


def contenders(run: Run, tokens: int, batch: int) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """Yield ``(name, stored bytes, one decode step)``; one that does not fit says so and is left out."""
    heads, kv_heads, head_dim = run.shape
    query = torch.randn(batch, heads, 1, head_dim, dtype=torch.bfloat16, device=run.device)

    def plain() -> tuple[int, Callable[[], object]]:
        states = torch.randn(2, batch, kv_heads, tokens, head_dim, dtype=torch.bfloat16, device=run.device)
        return states.nbytes, lambda: sdpa(query, states[0], states[1])

    def packed(nbits: int) -> tuple[int, Callable[[], object]]:
        from hfkv_triton.kernels import kernels

        view = packed_view(nbits, batch, tokens, run.shape, run.device)
        return view_bytes(view), lambda: kernels.attend(query, view, None, head_dim**-0.5, False)

    def quanto() -> tuple[int, Callable[[], object]]:
        stored = quanto_int4(tokens, batch, run.shape, run.device)
        size = sum(tensor_bytes(stored).values())
        return size, lambda: sdpa(query, *(states.dequantize() for states in stored))

    makers: dict[str, Callable[[], tuple[int, Callable[[], object]]]] = {
        "sdpa bfloat16": plain,
        "kivi 4 bit": lambda: packed(4),
        "kivi 2 bit": lambda: packed(2),
    }
    if run.device == "cuda":
        # on the CPU it first compiles an extension, for minutes
        makers["quanto int4"] = quanto
    for name, make in makers.items():
        try:
            size, call = make()
            call()
            synchronize()
        except torch.OutOfMemoryError:
            reason = f"{name}, {tokens} tokens, batch {batch}: out of memory"
            run.report["skipped"].append(reason)
            print(f"left out: {reason}", flush=True)
            torch.cuda.empty_cache()
            continue
        except Exception as error:
            run.fail(f"decode, {tokens} tokens, batch {batch}, {name}", error)
            continue
        yield name, size, call


def decode(run: Run, tokens: int, batch: int) -> None:
    """Time a decode step of each contender, in turns, and the memory that it takes beside what is stored."""
    found = list(contenders(run, tokens, batch))
    if not found:
        return
    times = in_turns({name: call for name, _, call in found}, 3 if run.smoke else 15)
    plain = times.get("sdpa bfloat16", {}).get("median")
    for name, size, call in found:
        peak = None
        if run.device == "cuda":
            synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            call()
            synchronize()
            peak = torch.cuda.max_memory_allocated() - before
        row = {"tokens": tokens, "batch": batch, "name": name, **{f"{k}_ms": v * 1e3 for k, v in times[name].items()}}
        row |= {"stored_bytes": size, "peak_bytes_of_a_step": peak, "bytes_per_second": size / times[name]["median"]}
        row["share_of_copy_bandwidth"] = row["bytes_per_second"] / run.report.get("copy_bytes_per_second", float("nan"))
        row["times_faster_than_sdpa"] = None if plain is None else plain / times[name]["median"]
        run.report["rows"].append(row)
        faster = "" if plain is None else f"{row['times_faster_than_sdpa']:.2f}x"
        print(
            f"{tokens:>7} {batch:>5} {name:>14} {row['median_ms']:>9.3f} "
            f"{row['least_ms']:>8.3f}-{row['most_ms']:<8.3f} "
            f"{faster:>7} {size / 2**20:>9.1f} {'-' if peak is None else f'{peak / 2**20:.1f}':>9} "
            f"{row['share_of_copy_bandwidth']:>6.0%}",
            flush=True,
        )


def decode_all(run: Run) -> None:
    """Every context and batch, the small ones first."""
    print(
        f"\none decode step of attention, {run.shape[0]} query heads, {run.shape[1]} KV heads, {run.shape[2]} channels"
    )
    print(
        f"{'tokens':>7} {'batch':>5} {'':>14} {'median ms':>9} {'least-most':>17} {'faster':>7} "
        f"{'MiB':>9} {'step MiB':>9} {'share':>6}"
    )
    sizes = [(340, 1)] if run.smoke else list(itertools.product((8192, 32768, 131072), (1, 8, 32)))
    for tokens, batch in sorted(sizes, key=lambda size: size[0] * size[1]):
        if run.left() < 15:
            run.report["skipped"].append(f"decode, {tokens} tokens, batch {batch}: for time")
            print(f"left out for time: {tokens} tokens, batch {batch}")
            continue
        # the packed tokens are whole blocks
        tokens += -(tokens - SINK - RESIDUAL) % 32
        run.attempt(f"decode, {tokens} tokens, batch {batch}", lambda t=tokens, b=batch: decode(run, t, b))


def main() -> int:
    """Run every part; 1 if one has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, on the CPU too (in Triton's interpreter)")
    parser.add_argument("--json", metavar="FILE", help="write everything that was found to a file")
    parser.add_argument("--seconds", type=float, default=460.0, help="after that long nothing new is begun")
    options = parser.parse_args()
    if not (options.smoke or torch.cuda.is_available()):
        parser.error("torch finds no GPU; --smoke runs tiny sizes without one")
    os.environ["HFKV_KERNELS"] = "triton"
    run = Run(options)
    for name, part in {
        "machine": machine,
        "ops against the reference": ops_against_reference,
        "generate": generate_on_device,
        "decode": decode_all,
        "conformance kit": conformance,
    }.items():
        run.attempt(name, lambda part=part: part(run))
    run.report |= {"failures": run.failures, "seconds": time.monotonic() - run.started}
    print(f"\n{len(run.failures)} failures, {len(run.report['skipped'])} left out, {run.report['seconds']:.0f} s")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(run.report, file, indent=2)
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
