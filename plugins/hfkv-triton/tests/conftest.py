"""Without a GPU the kernels run in Triton's interpreter, which must be chosen before they are decorated."""

import importlib.util
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

HAS_TRITON = importlib.util.find_spec("triton") is not None


def pytest_collection_modifyitems(items):
    if not HAS_TRITON:
        for item in items:
            if item.path.parent.parent.name == "hfkv-triton":
                item.add_marker(pytest.mark.skip(reason="triton is not installed"))


@pytest.fixture(scope="session")
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"
