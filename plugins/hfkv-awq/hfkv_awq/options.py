"""The options of the weight quantizer "awq"."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfkv.cache import check_choice, check_length, option
from hfkv.weights import RoundedOptions

SOURCES = ("calibration_text", "calibration_file", "calibration_ids")


@dataclass(frozen=True, kw_only=True)
class AwqOptions(RoundedOptions):
    """The grid, what is done before rounding, and the text that decides it; the text is not saved with the model."""

    symmetric: bool = option(False, "False stores an offset too; True: zero is on the grid and only a scale is stored")
    clip: bool = option(True, "narrow each group's range where that lowers the error on the text")
    fold: bool = option(True, "True: inputs are divided in the layers before, at no cost; False: in each layer itself")
    outlier_features: int = option(0, "so many input features of each layer, those that cost most, keep 16 bits")
    calibration_text: str | None = option(None, "the text; by default Python's own help", saved=False)
    calibration_file: str | Path | None = option(None, "a file with the text", saved=False)
    calibration_ids: Any = option(None, "token ids in place of a text: a list of lists, or a tensor", saved=False)
    calibration_tokens: int = option(4096, "so many tokens of the text are read", saved=False)
    tokenizer: Any = option(None, "a tokenizer, its name or folder; by default that of the model", saved=False)

    def __post_init__(self) -> None:
        """Check the values and how they go together."""
        super().__post_init__()
        check_choice("clip", self.clip, (True, False))
        check_choice("fold", self.fold, (True, False))
        check_length("outlier_features", self.outlier_features)
        check_length("calibration_tokens", self.calibration_tokens, minimum=1)
        given = [name for name in SOURCES if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are two calibration texts: pass one")
