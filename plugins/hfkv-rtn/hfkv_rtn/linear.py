"""Round to nearest, each weight as it is."""

from __future__ import annotations

from hfkv.weights import RoundedLinear

from .options import RtnOptions


class RtnLinear(RoundedLinear):
    """A weight in 2, 3, 4 or 8 bits or in nf4."""

    Options = RtnOptions
    backend = "rtn"
