"""Attention on a packed cache, of a decode step or a chunk of queries, against torch's own SDPA, in turns in one run.

    OMP_NUM_THREADS=2 python benchmarks/attend.py
    OMP_NUM_THREADS=2 python benchmarks/attend.py --queries 5 16 64 256 --nbits 4
    OMP_NUM_THREADS=2 python benchmarks/attend.py --tokens 4096 --heads 8 8 128 --repeats 15 --json

Prints ratios of medians (above 1: the packed cache is faster) and the share of the machine's copy bandwidth at which
the packed bytes were read. Both are given the same query in the layout that suits them best: SDPA the query heads of a
KV head as rows of one product, as transformers does for one-token steps, and with several queries the mask that makes
them causal.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from timing import Table, in_turns, machine_line

from hfkv.cache import KVView, PackedBlocks, PackedFormat
from hfkv_cpu.kernels import CpuKernels

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# exact tokens of a kivi cache with its defaults, on average: sinks, residual, half a block
SINK, RESIDUAL = 4, 144


def random_blocks(format: PackedFormat, kv_heads: int, tokens: int) -> PackedBlocks:
    """Blocks of random codes: what they stand for does not change the time."""
    blocks = PackedBlocks.empty(format, 1, kv_heads, tokens // format.block_length)
    blocks.codes.random_(0, 256)
    blocks.scale.uniform_(0.05, 0.1)
    blocks.offset.uniform_(-0.5, 0.0)
    return blocks


def make_view(nbits: int, kv_heads: int, tokens: int, head_dim: int, dtype: torch.dtype) -> KVView:
    """Packed tokens, and sinks and residual on top of them."""
    exact = torch.randn(2, 1, kv_heads, SINK + RESIDUAL, head_dim, dtype=dtype)
    formats = PackedFormat(nbits, "channel", 32, head_dim), PackedFormat(nbits, "token", 32, head_dim)
    return KVView.of(exact[0], exact[1], SINK, *(random_blocks(format, kv_heads, tokens) for format in formats))


def causal_mask(queries: int, tokens: int, share: int, dtype: torch.dtype) -> torch.Tensor | None:
    """What the last queries may see, for the query heads of a KV head one after the other; one query sees all."""
    if queries == 1:
        return None
    visible = torch.ones(queries, tokens, dtype=torch.bool).tril_(tokens - queries)
    mask = torch.zeros(queries, tokens, dtype=dtype).masked_fill_(~visible, -torch.inf)
    return mask.repeat(share, 1)[None, None]


def packed_bytes(view: KVView) -> int:
    """Bytes that a step has to read from the packed blocks."""
    parts = (tensor for blocks in (view.keys, view.values) for tensor in (blocks.codes, blocks.scale, blocks.offset))
    return sum(tensor.nbytes for tensor in parts)


def copy_bandwidth(megabytes: int = 256) -> float:
    """Bytes per second, read and written, of a copy that no cache holds."""
    source = torch.ones(megabytes * 2**18)
    target = torch.empty_like(source)
    times = in_turns({"copy": lambda: target.copy_(source)}, repeats=7)
    return 2 * source.nbytes / times["copy"]


def measure(
    kernels: CpuKernels,
    shape: list[int],
    tokens: int,
    queries: int,
    dtype: torch.dtype,
    widths: list[int],
    repeats: int,
) -> Iterator[dict[str, Any]]:
    """Yield one row per width; all widths and SDPA take turns."""
    heads, kv_heads, head_dim = shape
    query = torch.randn(1, heads, queries, head_dim, dtype=dtype)
    rows = query.view(1, kv_heads, heads // kv_heads * queries, head_dim)
    dense = torch.randn(2, 1, kv_heads, tokens + SINK + RESIDUAL, head_dim, dtype=dtype)
    views = {nbits: make_view(nbits, kv_heads, tokens, head_dim, dtype) for nbits in widths}
    scale = head_dim**-0.5
    mask = causal_mask(queries, dense.shape[3], heads // kv_heads, dtype)
    calls = {
        "sdpa": lambda: torch.nn.functional.scaled_dot_product_attention(rows, dense[0], dense[1], mask, scale=scale)
    }
    for nbits, view in views.items():
        calls[f"{nbits} bit"] = lambda view=view: kernels.attend(query, view, None, scale, queries > 1)
    times = in_turns(calls, repeats)
    for nbits, view in views.items():
        seconds = times[f"{nbits} bit"]
        yield {
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "tokens": tokens,
            "queries": queries,
            "dtype": str(dtype).removeprefix("torch."),
            "nbits": nbits,
            "sdpa_ms": times["sdpa"] * 1e3,
            "packed_ms": seconds * 1e3,
            "times_faster": times["sdpa"] / seconds,
            "bytes_per_second": packed_bytes(view) / seconds,
        }


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 32768], help="packed tokens, multiples of 32")
    parser.add_argument("--queries", type=int, nargs="+", default=[1], help="tokens that attend at once")
    parser.add_argument(
        "--heads", type=int, nargs=3, default=[32, 8, 128], metavar=("HEADS", "KV_HEADS", "HEAD_DIM"), help="the shape"
    )
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES), help="of the query and of SDPA")
    parser.add_argument("--nbits", type=int, nargs="+", choices=(2, 3, 4, 8), default=[2, 3, 4, 8], help="widths")
    parser.add_argument("--repeats", type=int, default=15, help="timings of each, of which the median counts")
    parser.add_argument("--isa", default=None, help="the instruction set, in place of the best that there is")
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the table")
    options = parser.parse_args()
    kernels = CpuKernels(options.isa)
    bandwidth = copy_bandwidth()
    report = {"machine": machine_line(), "isa": kernels.isa, "copy_bytes_per_second": bandwidth}
    head = [
        f"kernels {kernels.isa}, copy bandwidth {bandwidth / 1e9:.1f} GB/s",
        "tokens queries     dtype  bits   sdpa ms packed ms  faster   GB/s  share",
    ]
    table = Table(report, head, options.json)
    for tokens, queries, dtype in itertools.product(options.tokens, options.queries, options.dtype):
        rows = measure(kernels, options.heads, tokens, queries, DTYPES[dtype], options.nbits, options.repeats)
        for row in rows:
            row["share_of_copy_bandwidth"] = row["bytes_per_second"] / bandwidth
            table.add(
                row,
                f"{tokens:>6} {queries:>7} {dtype:>9} {row['nbits']:>5} {row['sdpa_ms']:>9.3f} "
                f"{row['packed_ms']:>9.3f} {row['times_faster']:>6.2f}x {row['bytes_per_second'] / 1e9:>6.1f} "
                f"{row['share_of_copy_bandwidth']:>6.0%}",
            )
    table.close()


if __name__ == "__main__":
    main()
