"""Without a GPU the kernels run in Triton's interpreter, which must be chosen before anything imports Triton.

In a run that did not choose it, where other tests may have imported Triton already, `test_in_interpreter.py` stands for
the rest: it runs them in a process of their own.
"""

import importlib.util
import os

import pytest
import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
DIRECT = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"

collect_ignore_glob = ["test_in_interpreter.py"] if DIRECT else ["test_[!i]*.py"]


def pytest_collection_modifyitems(items):
    if not HAS_TRITON:
        for item in items:
            if item.path.parent.parent.name == "hfkv-triton":
                item.add_marker(pytest.mark.skip(reason="triton is not installed"))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"
