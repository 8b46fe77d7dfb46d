"""The pytest plugin: parametrises every test that takes ``hfkv_case`` over the installed caches.

Imports neither torch nor transformers, and costs a test run without such tests nothing.
"""

from __future__ import annotations

import pytest

from .. import registry
from . import cases

# the contracts are rewritten where they are collected; here, where they are called by others, and their helpers
pytest.register_assert_rewrite("hfkv.testing.contracts", "hfkv.testing.models", "hfkv.testing.oracle")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that choose what is tested."""
    group = parser.getgroup("hfkv", "hfkv: conformance of KV caches")
    group.addoption(
        "--hfkv-plugin",
        action="append",
        default=[],
        metavar="NAME",
        help="test only the caches of this plugin (as `hfkv list` names it); may be given several times",
    )
    group.addoption(
        "--hfkv-cache",
        action="append",
        default=[],
        metavar="NAME[:OPTION=VALUE,...]",
        help="test only this cache, with these options besides its contract options; may be given several times",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse names that are not there before anything is collected."""
    if config.getoption("--hfkv-plugin") or config.getoption("--hfkv-cache"):
        _selected(config)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes ``hfkv_case`` once for each cache."""
    if "hfkv_case" not in metafunc.fixturenames:
        return
    parameters = [pytest.param(case, id=case.label, marks=_reason_to_skip(case)) for case in _selected(metafunc.config)]
    metafunc.parametrize("hfkv_case", parameters)


def _selected(config: pytest.Config) -> list[cases.CacheCase]:
    try:
        found = cases.select(config.getoption("--hfkv-plugin"), config.getoption("--hfkv-cache"))
    except (ValueError, ImportError) as error:
        raise pytest.UsageError(str(error)) from error
    if not found:
        raise pytest.UsageError("no installed plugin provides a cache: see `hfkv list`")
    return found


def _reason_to_skip(case: cases.CacheCase) -> list[pytest.MarkDecorator]:
    problems = registry.unmet(case.spec)
    return [pytest.mark.skip(reason=f"{case.spec.name} needs {'; '.join(problems)}")] if problems else []
