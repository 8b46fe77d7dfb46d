"""The axes that the contracts are run over, besides the caches."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from .models import FAMILIES

every_attention = pytest.mark.parametrize("attention", ["sdpa", "eager"])
# deepseek_v2 caches what deepseek_v3 does, and turns its queries otherwise: what `generate` makes of it is enough
every_family = pytest.mark.parametrize("family", [name for name in FAMILIES if name != "deepseek_v2"])
every_generating_family = pytest.mark.parametrize("family", list(FAMILIES))


def families(names: Iterable[str]) -> pytest.MarkDecorator:
    """Run a contract on these families only; the contract says why."""
    return pytest.mark.parametrize("family", list(names))


# where a mode is for decoders alone: a second turn, a prompt in chunks, padding on the left of the decoder
every_decoder = families(name for name in FAMILIES if name != "t5")
