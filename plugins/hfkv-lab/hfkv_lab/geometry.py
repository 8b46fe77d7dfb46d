"""Which geometry a model's keys and values ask for: each is tried at 2 bits, and the attention output compared.

Rotations: Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", 2024.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from hfkv import kernels, registry
from hfkv.cache import KVQuantizer, PackedFormat
from hfkv.cache.packed import Axis
from hfkv.specs import KVQuantizerSpec

from .attention_error import relative
from .recording import Call

NBITS = 2
GROUP_SIZE = 32
SINKS = 4


@dataclass(frozen=True)
class Trial:
    """One geometry.

    Attributes
    ----------
    part
        ``"keys"`` or ``"values"``: what is quantized; the other is exact.
    axis
        ``"channel"`` or ``"token"``.
    sinks
        First tokens in full precision.
    rotated
        Whether the channels are rotated first, by a Hadamard matrix.
    reconstruction, output
        Relative error of the part and of the attention output, averaged over the layers.
    """

    part: str
    axis: Axis
    sinks: int
    rotated: bool
    reconstruction: float
    output: float


def trials(calls: Sequence[Call]) -> list[Trial]:
    """Every geometry that applies to the layers; rotations where ``head_dim`` is a power of two."""
    quantizer = registry.find(KVQuantizerSpec, "rtn", "backend")()
    result = []
    for part in ("keys", "values"):
        for axis in ("channel", "token"):
            for sinks in (0, SINKS):
                for rotated in (False, True):
                    trial = Trial(part, axis, sinks, rotated, 0.0, 0.0)
                    errors = [_errors(call, trial, quantizer) for call in calls]
                    if None not in errors:
                        means = [statistics.mean(error[index] for error in errors if error) for index in (0, 1)]
                        result.append(replace(trial, reconstruction=means[0], output=means[1]))
    return result


def best(found: Sequence[Trial], part: str, sinks: int, rotated: bool = False) -> Trial:
    """The trial of a part with the smallest error of the output."""
    mine = [trial for trial in found if (trial.part, trial.sinks, trial.rotated) == (part, sinks, rotated)]
    return min(mine, key=lambda trial: trial.output)


def _errors(call: Call, trial: Trial, quantizer: KVQuantizer) -> tuple[float, float] | None:
    states = call.key if trial.part == "keys" else call.value
    rotation = hadamard(states.shape[3]) if trial.rotated else None
    if trial.rotated and rotation is None:
        return None
    # whole blocks of what is not decoded right now
    blocks = (states.shape[2] - call.query.shape[2] - trial.sinks) // GROUP_SIZE
    begin, end = trial.sinks, trial.sinks + blocks * GROUP_SIZE
    format = PackedFormat(NBITS, trial.axis, GROUP_SIZE, states.shape[3])
    leaving = states[:, :, begin:end].float()
    if rotation is not None:
        leaving = leaving @ rotation.to(leaving)
    packed = kernels.unpack(kernels.pack(leaving.contiguous(), format, quantizer), torch.float32)
    if rotation is not None:
        packed = packed @ rotation.to(packed).T
    restored = states.clone()
    restored[:, :, begin:end] = packed.to(states.dtype)
    key, value = (restored, call.value) if trial.part == "keys" else (call.key, restored)
    exact = call.output(call.key, call.value)
    return relative(restored, states), relative(call.output(key, value), exact)


def hadamard(size: int) -> torch.Tensor | None:
    """The orthogonal Hadamard matrix, by Sylvester's doubling; None for a size that is no power of two."""
    if size < 1 or size & (size - 1):
        return None
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5
