"""The options of the weight quantizer "rtn"."""

from __future__ import annotations

from dataclasses import dataclass

from hfkv.weights import RoundedOptions


@dataclass(frozen=True, kw_only=True)
class RtnOptions(RoundedOptions):
    """How a weight is rounded."""
