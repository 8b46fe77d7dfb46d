"""What every contract runs under."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hfkv import registry
from hfkv.testing.cases import WeightCase, select_weights


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Models this small run several times faster on one thread, and sums are always taken in one order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def every_weight_case(request: pytest.FixtureRequest) -> list[WeightCase]:
    """All selected weight quantizers with all their settings, for a contract that is costly to run for each."""
    found = select_weights(request.config.getoption("--hfkv-plugin"))
    usable = [case for case in found if not registry.unmet(case.spec)]
    if not usable or request.config.getoption("--hfkv-cache"):
        pytest.skip("no weight quantizer is selected")
    return usable
