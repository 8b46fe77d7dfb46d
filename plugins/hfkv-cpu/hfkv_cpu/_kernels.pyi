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
    ) -> None: ...

def isa_names() -> list[str]: ...
def threads_from() -> str: ...
def attend(
    isa: int,
    threads: int,
    query: tuple[Any, ...],
    exact_keys: tuple[Any, ...],
    exact_values: tuple[Any, ...],
    keys: tuple[Any, ...],
    values: tuple[Any, ...],
    mask: tuple[Any, ...] | None,
    output: tuple[Any, ...],
    lse: int,
    sizes: tuple[int, ...],
    scale: float,
    causal: bool,
) -> None: ...
def pack(isa: int, threads: int, states: tuple[Any, ...], blocks: tuple[Any, ...], batch: int, heads: int) -> None: ...
def unpack(
    isa: int, threads: int, states: tuple[Any, ...], blocks: tuple[Any, ...], batch: int, heads: int
) -> None: ...
