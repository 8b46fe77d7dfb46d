"""What the machine is good at."""

from __future__ import annotations

import torch


def chosen_device(asked: str) -> str:
    """A device by name; ``"auto"`` is the GPU where there is one.

    Raises
    ------
    ValueError
        A GPU is asked for, and there is none.
    """
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if torch.device(asked).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={asked!r}: no GPU is there. Fix: cpu")
    return asked


def has_fast_bf16(device: str) -> bool:
    """Whether products of bfloat16 are faster than those of float32: tile units of a CPU, or a recent GPU."""
    if torch.device(device).type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    # releases before 2.9 do not tell: float32 is right everywhere
    tell = getattr(torch.cpu, "get_capabilities", dict)
    return bool(tell().get("amx_bf16"))
