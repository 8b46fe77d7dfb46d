"""The options of the weight quantizer "bnb"."""

from __future__ import annotations

from dataclasses import dataclass

from hfkv.cache import check_choice, option
from hfkv.weights import WeightOptions

DEFAULTS = {4: "nf4", 8: "int8"}


@dataclass(frozen=True, kw_only=True)
class BnbOptions(WeightOptions):
    """How bitsandbytes quantizes a weight."""

    nbits: int = option(4, "4 or 8")
    quant_type: str | None = option(None, "`nf4` or `fp4` with 4 bits, `int8` with 8; None is nf4 or int8")
    block_size: int = option(64, "with 4 bits: numbers that share a scale, counted through the rows")
    double_quant: bool = option(False, "with 4 bits: the scales are quantized too, to 8 bits in blocks of 256")
    threshold: float = option(6.0, "with 8 bits: input features beyond it are computed in 16 bits; 0: none")

    def __post_init__(self) -> None:
        """Check the values and how they go together."""
        check_choice("nbits", self.nbits, (4, 8))
        check_choice("quant_type", self.quant_type, (None, "nf4", "fp4", "int8"))
        check_choice("block_size", self.block_size, (32, 64, 128, 256, 512, 1024, 2048, 4096))
        check_choice("double_quant", self.double_quant, (True, False))
        if (self.kind == "int8") != (self.nbits == 8):
            allowed = "'int8'" if self.nbits == 8 else "'nf4' or 'fp4'"
            raise ValueError(f"quant_type={self.quant_type!r} does not have nbits={self.nbits}: choose {allowed}")
        if not isinstance(self.threshold, int | float) or isinstance(self.threshold, bool) or self.threshold < 0:
            raise ValueError(f"threshold={self.threshold!r} must be a number of at least 0")
        if self.double_quant and self.nbits == 8:
            raise ValueError("double_quant=True needs nbits=4: 8 bits have one scale per row")

    @property
    def kind(self) -> str:
        """The type of the codes."""
        return self.quant_type or DEFAULTS[self.nbits]
