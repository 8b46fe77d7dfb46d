"""Compile every kernel for a GPU that need not be there, and print the shared memory that each takes.

python tests/compile_kernels.py cuda:90
"""

from __future__ import annotations

import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hfkv.cache import PackedFormat
from hfkv_triton import attend, convert
from hfkv_triton import kernels as entry

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
OPTIONS = ("num_warps", "num_stages")


def shared_memory(kernel, target, types, constants):
    """Bytes of shared memory; arguments without a type are 32-bit lengths and strides."""
    options = {name: constants[name] for name in OPTIONS if name in constants}
    constants = {name: value for name, value in constants.items() if name not in OPTIONS}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=target, options=options).metadata.shared


def attend_arguments(keys, values, shared, queries, dtype, mask, target):
    constants = dict(entry.attend_plan(keys, values, shared, queries, dtype))
    if target.backend == "cuda" and dtype != torch.bfloat16:
        constants["PRECISION"] = "tf32" if dtype == torch.float16 else "tf32x3"
    constants |= {"MASK": mask, "CAUSAL": mask == 0 and queries > 1}
    constants |= {"query_channel": 1, "exact_key_channel": 1, "exact_value_channel": 1, "mask_column": 1}
    name = f"*{NAMES[dtype]}"
    types = {"output": "*fp32", "lse": "*fp32", "query": name, "exact_keys": name, "exact_values": name}
    types |= {"mask": {0: "*fp32", 1: "*u8", 2: name}[mask], "softmax_scale": "fp32"}
    for part in ("key", "value"):
        words = constants[f"{part.upper()}_WORDS"]
        types |= {f"{part}_codes": "*i32" if words else "*u8", f"{part}_scale": "*fp16", f"{part}_offset": "*fp16"}
        if constants[f"{part.upper()}_BOOK"]:
            types[f"{part}_book"] = "*fp32"
        else:
            constants[f"{part}_book"] = None
    return types, constants


def cases(target):
    """Yield ``(label, kernel, types, constants)``."""
    book = tuple(float(level) for level in range(16))
    for nbits, head_dim, shared, queries, dtype, mask, codebook in (
        (4, 128, 4, 1, torch.bfloat16, 0, None),
        (2, 128, 4, 40, torch.bfloat16, 1, None),
        (3, 64, 7, 1, torch.float16, 2, None),
        (8, 80, 1, 40, torch.float32, 0, None),
        (4, 256, 2, 40, torch.bfloat16, 2, book),
        (4, 512, 8, 1, torch.bfloat16, 0, None),
    ):
        keys, values = (PackedFormat(nbits, axis, 32, head_dim, codebook) for axis in ("channel", "token"))
        types, constants = attend_arguments(keys, values, shared, queries, dtype, mask, target)
        yield f"attend {nbits} bit {head_dim} {queries} {dtype}", attend.attend, types, constants
    keys, values = PackedFormat(3, "token", 24, 80), PackedFormat(8, "channel", 24, 80)
    yield "attend other axes", attend.attend, *attend_arguments(keys, values, 4, 1, torch.bfloat16, 0, target)
    parts = {"output": "*bf16", "lse": "*fp32", "parts": "*fp32", "part_lse": "*fp32"}
    yield "merge", attend.merge, parts, {"DIM": 80, "PAD": 128, "SPLITS": 16}
    packed = {"states": "*bf16", "codes": "*u8", "scale": "*fp16", "offset": "*fp16"}
    for nbits, axis in ((3, "channel"), (4, "token")):
        format = PackedFormat(nbits, axis, 32, 80)
        yield f"pack {nbits} bit", convert.pack, packed, entry.pack_plan(format)
        yield f"unpack {nbits} bit", convert.unpack, packed, {**entry.unpack_plan(format), "book": None}


def main() -> None:
    backend, _, architecture = sys.argv[1].partition(":")
    target = GPUTarget(backend, architecture, 64) if backend == "hip" else GPUTarget(backend, int(architecture), 32)
    for label, kernel, types, constants in cases(target):
        print(label, shared_memory(kernel, target, types, constants), flush=True)


if __name__ == "__main__":
    main()
