"""The pytest plugin: runs each test that takes one of `FIXTURES` over what is installed.

Imports neither torch nor transformers, and costs a test run without such tests nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from .. import registry
from . import cases

# the contracts are rewritten where they are collected; here, where they are called by others, and their helpers
pytest.register_assert_rewrite("hfkv.testing.contracts", "hfkv.testing.models", "hfkv.testing.oracle")

# what a test takes to be run over what is installed
FIXTURES = ("hfkv_case", "hfkv_quantizer", "hfkv_weights", "hfkv_all_weights", "hfkv_assistant")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that choose what is tested."""
    group = parser.getgroup("hfkv", "hfkv: conformance of KV caches")
    group.addoption(
        "--hfkv-plugin",
        action="append",
        default=[],
        metavar="NAME",
        help="test only what this plugin (as `hfkv list` names it) provides; may be given several times",
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
    """Run a test that takes one of `FIXTURES` once for each cache, quantizer or assistant."""
    # in one order: processes that share the tests have to collect the same
    for fixture in [fixture for fixture in FIXTURES if fixture in metafunc.fixturenames]:
        cases = _selected(metafunc.config, fixture)
        # None marks a test that `pytest_collection_modifyitems` takes out again
        parameters = [pytest.param(case, id=case.label, marks=_reason_to_skip(case)) for case in cases]
        metafunc.parametrize(fixture, parameters or [pytest.param(None, id="none")])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out contracts about what no selected plugin provides."""
    left_out = [item for item in items if _about_nothing(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not _about_nothing(item)]


def _about_nothing(item: pytest.Item) -> bool:
    call = getattr(item, "callspec", None)
    return call is not None and any(call.params.get(fixture, item) is None for fixture in FIXTURES)


def _selected(config: pytest.Config, fixture: str = "hfkv_case") -> list[Any]:
    plugins, caches = config.getoption("--hfkv-plugin"), config.getoption("--hfkv-cache")
    try:
        if fixture == "hfkv_case":
            found: list[Any] = cases.select(plugins, caches)
        else:
            select: dict[str, Callable[..., list[Any]]] = {
                "hfkv_quantizer": cases.select_quantizers,
                "hfkv_assistant": cases.select_assistants,
            }
            # who names a cache wants that cache tested
            found = [] if caches else select.get(fixture, cases.select_weights)(plugins)
    except (ValueError, ImportError) as error:
        raise pytest.UsageError(str(error)) from error
    if fixture == "hfkv_all_weights":
        usable = tuple(case for case in found if not registry.unmet(case.spec))
        return [cases.WeightCases(usable)] if usable else []
    if fixture == "hfkv_case" and not found and not plugins:
        raise pytest.UsageError("no installed plugin provides a cache: see `hfkv list`")
    return found


def _reason_to_skip(case: Any) -> list[pytest.MarkDecorator]:
    if isinstance(case, cases.WeightCases):
        return []
    problems = registry.unmet(case.spec)
    return [pytest.mark.skip(reason=f"{case.spec.name} needs {'; '.join(problems)}")] if problems else []
