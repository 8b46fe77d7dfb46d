"""``hfkv list --kernels``: which kernel runs what, and each candidate's reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

# of packed caches, and of packed weights
OPS = ("pack", "unpack", "attend", "dequantize", "matmul")
WEIGHT_OPS = ("dequantize", "matmul")
DTYPES = ("float32", "bfloat16", "float16")
# bits, and whether the codes are in halves, the upper one of which is also read alone
WIDTHS = ((2, False), (3, False), (4, False), (8, False), (8, True))
# what most models have; a kernel that refuses another size says so when it is asked for it
HEAD_DIM = 128
GROUP_SIZE = 32


def choices() -> list[dict[str, Any]]:
    """One entry for each op, quantizer (pack only), device, dtype and width, with every kernel's verdict.

    The formats are KIVI's: keys per channel, values per token, 8 bits in one piece and in halves (hierarchical); those
    of weights have offsets. Imports torch.
    """
    import torch

    from .. import registry
    from ..kernels import Request
    from ..specs import KVQuantizerSpec
    from ..weights import Grid

    quantizers = [spec for spec in registry.manager().specs(KVQuantizerSpec).values() if not registry.unmet(spec)]
    result = []
    for op in OPS:
        for quantizer in quantizers if op == "pack" else [None]:
            for device in devices():
                for dtype in DTYPES:
                    for nbits, halves in WIDTHS:
                        weights = op in WEIGHT_OPS
                        if (quantizer is not None and nbits not in quantizer.nbits) or (weights and halves):
                            continue
                        name = None if quantizer is None else quantizer.name
                        grid = Grid(nbits, GROUP_SIZE, affine=True) if weights else None
                        formats = () if weights else _formats(op, nbits, halves)
                        request = Request(op, device, getattr(torch, dtype), formats, name, grid)  # type: ignore[arg-type]
                        asked = {"op": op, "quantizer": name, "device": device, "dtype": dtype, "nbits": nbits}
                        result.append(asked | {"hierarchical": halves} | _verdicts(request))
    return result


def _formats(op: str, nbits: int, hierarchical: bool) -> tuple[Any, ...]:
    from ..cache.packed import PackedFormat

    keys = PackedFormat(nbits, "channel", GROUP_SIZE, HEAD_DIM, hierarchical=hierarchical)
    return (keys, replace(keys, axis="token")) if op == "attend" else (keys,)


def devices() -> list[str]:
    """The kinds of device that this process can use."""
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


def _verdicts(request: Any) -> dict[str, Any]:
    from ..kernels import explain

    try:
        verdicts = explain(request)
    # a broken kernel is what this listing has to show
    except Exception as error:
        return {"kernel": None, "verdicts": [], "error": f"{type(error).__name__}: {error}"}
    runs = next(verdict.name for verdict in verdicts if verdict.supported)
    listed = [
        {"kernel": verdict.name, "supported": verdict.supported, "reason": verdict.reason} for verdict in verdicts
    ]
    return {"kernel": runs, "verdicts": listed, "error": None}


def show(console: Console, found: list[dict[str, Any]], explain: bool) -> None:
    """Print the choices, a row for each op, device and dtype; with the reasons where they are asked for."""
    # narrow: in a terminal of 80 columns no cell is cut
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    widths = [_width(*width) for width in WIDTHS]
    for column in ("op", "device", "dtype", *(f"{width} bit" for width in widths)):
        table.add_column(column)
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    for choice in found:
        row = rows.setdefault((_op(choice), choice["device"], choice["dtype"]), {})
        row[_width(choice["nbits"], choice["hierarchical"])] = choice["kernel"] or "[red]broken[/]"
    for key, cells in rows.items():
        table.add_row(*key, *(cells.get(width, "[dim]-[/]") for width in widths))
    about = f"kernels for groups of {GROUP_SIZE} and {HEAD_DIM} channels; keys per channel, values per token"
    console.print(f"{about}; 2x4 bit: 8 in halves (hierarchical=True); weights with offsets\n")
    console.print(table)
    for error in dict.fromkeys(choice["error"] for choice in found if choice["error"]):
        console.print(f"\n[red]broken:[/] {escape(error)}", soft_wrap=True)
    if explain:
        console.print()
        console.print(_reasons(found))


def _op(choice: dict[str, Any]) -> str:
    return f"{choice['op']} ({choice['quantizer']})" if choice["quantizer"] else choice["op"]


def _width(nbits: int, hierarchical: bool) -> str:
    return f"2x{nbits // 2}" if hierarchical else str(nbits)


def _reasons(found: list[dict[str, Any]]) -> Table:
    """Requests with the same answers share a row."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("request", "kernel", "runs", "reason"):
        table.add_column(column, overflow="fold")
    for verdicts, *asked in _merged(found):
        request = ", ".join("/".join(values) for values in asked) + " bit"
        taken = False
        for kernel, supported, reason in verdicts:
            runs = "[green]yes[/]" if supported and not taken else "could" if supported else "[dim]no[/]"
            taken = taken or supported
            table.add_row(request, kernel, runs, escape(reason))
            request = ""
    return table


def _merged(found: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """``(verdicts, ops, devices, dtypes, widths)``; each stands for all the combinations that it names."""
    groups: list[tuple[Any, ...]] = [
        (
            tuple((item["kernel"], item["supported"], item["reason"]) for item in choice["verdicts"]),
            (_op(choice),),
            (choice["device"],),
            (choice["dtype"],),
            (_width(choice["nbits"], choice["hierarchical"]),),
        )
        for choice in found
        if choice["verdicts"]
    ]
    # along one axis at a time, and only what is equal along all others: else a group would claim more than was asked
    for axis in (4, 3, 2, 1):
        merged: dict[tuple[Any, ...], tuple[str, ...]] = {}
        for group in groups:
            key = (*group[:axis], *group[axis + 1 :])
            merged[key] = merged.get(key, ()) + group[axis]
        groups = [(*key[:axis], values, *key[axis:]) for key, values in merged.items()]
    return groups
