from typing import Any

class Format:
    def __init__(
        self,
        nbits: int,
        channel_axis: bool,
        block_length: int,
        head_dim: int,
        runs: int,
        group: int,
        group_bytes: int,
        groups: int,
        codebook: list[float],
        plane: int,
        upper: bool,
    ) -> None: ...

class Blocks:
    def __init__(
        self,
        format: Format,
        owner: object,
        count: int,
        codes: int,
        scale: int,
        offset: int,
        codes_strides: tuple[int, ...],
        scale_strides: tuple[int, ...],
    ) -> None: ...

class Exact:
    def __init__(self, keys: tuple[int, ...], values: tuple[int, ...]) -> None: ...

class Grid:
    def __init__(self, code: int, middle: float, levels: list[float]) -> None: ...

def isa_names() -> list[str]: ...
def threads_from() -> str: ...
def attend(
    isa: int,
    threads: int,
    query: int,
    type: int,
    query_sizes: tuple[int, ...],
    query_strides: tuple[int, ...],
    exact: Exact,
    exact_length: int,
    sink: int,
    keys: Blocks,
    values: Blocks,
    kv_heads: int,
    mask: tuple[Any, ...] | None,
    output: int,
    lse: int,
    scale: float,
    causal: bool,
) -> None: ...
def pack(isa: int, threads: int, states: tuple[Any, ...], blocks: Blocks, batch: int, heads: int) -> None: ...
def unpack(isa: int, threads: int, states: tuple[Any, ...], blocks: Blocks, batch: int, heads: int) -> None: ...
def matmul(
    isa: int,
    threads: int,
    grid: Grid,
    codes: int,
    scale: int,
    offset: int,
    one_scale: bool,
    group: int,
    row_bytes: int,
    rows: int,
    inputs: int,
    outputs: int,
    x: int,
    x_stride: int,
    y: int,
    y_stride: int,
    type: int,
) -> None: ...
