"""How many bytes weights take in each format."""

from __future__ import annotations

from dataclasses import dataclass

from hfkv.cli.settings import parse_option

from .arguments import choose
from .plan_model import Parameters


@dataclass(frozen=True)
class WeightFormat:
    """A format of the matrices; what is no matrix has ``rest_bytes`` a number.

    Attributes
    ----------
    bits
        Bits of one number.
    group_size
        Numbers that share a scale; None where a scale is shared by a whole row or more, which is not counted.
    group_bytes
        Bytes that a group's scale, and its zero where it has one, take.
    rest_bytes
        Bytes of a number outside the matrices.
    """

    name: str
    bits: float
    group_size: int | None = None
    group_bytes: float = 0.0
    rest_bytes: int = 2

    def bytes_of(self, parameters: Parameters) -> int:
        """Bytes of all weights."""
        scales = 0.0 if self.group_size is None else self.group_bytes / self.group_size
        return round(parameters.matrices * (self.bits / 8 + scales)) + parameters.rest * self.rest_bytes


FORMATS = {
    weights.name: weights
    for weights in (
        WeightFormat("float32", 32, rest_bytes=4),
        WeightFormat("bfloat16", 16),
        WeightFormat("float16", 16),
        WeightFormat("fp8", 8),
        WeightFormat("int8", 8),
        # a float16 scale and zero for each group, as hqq and quanto have
        WeightFormat("int4", 4, 64, 4),
        WeightFormat("int3", 3, 64, 4),
        WeightFormat("int2", 2, 64, 4),
        # bitsandbytes: a float32 maximum for each block of 64
        WeightFormat("nf4", 4, 64, 4),
        # an 8-bit exponent for each block of 32
        WeightFormat("mxfp4", 4, 32, 1),
    )
}


def parse_weights(text: str) -> WeightFormat:
    """``NAME`` or ``NAME:group_size=128``.

    Raises
    ------
    ValueError
        Another name, another option, or a group size that is no positive number.
    """
    name, _, options = text.partition(":")
    found = choose("--weights", name, FORMATS)
    for part in filter(None, options.split(",")):
        key, value = parse_option(part)
        if key != "group_size" or found.group_size is None:
            allowed = "takes group_size" if found.group_size is not None else "takes no options"
            raise ValueError(f"--weights {text!r}: {name} {allowed}, got {key}")
        if type(value) is not int or value < 1:
            raise ValueError(f"--weights {text!r}: group_size={value!r} must be a positive integer, such as 128")
        found = WeightFormat(text, found.bits, value, found.group_bytes, found.rest_bytes)
    return found
