"""The suite without torch, as with another Python: what needs more than is there is skipped."""

from __future__ import annotations

from collections.abc import Generator
from importlib.metadata import PackageNotFoundError

import pytest

_MISSING = (ModuleNotFoundError, PackageNotFoundError)

REASON = "needs a package that is not installed here"


def pytest_configure() -> None:
    """Skip tests that start processes, which are forks of one that has torch."""
    from tests.harness import preloaded

    def start(command: list[str]) -> str:
        pytest.skip(f"{command[0]} {REASON}")

    preloaded._server_of = start


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip modules that import what is not there."""
    report = yield
    if report.failed and any(error.__name__ in str(report.longrepr) for error in _MISSING):
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, REASON)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skip tests that import what is not there."""
    report = yield
    if report.failed and call.excinfo and call.excinfo.errisinstance(_MISSING):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 0, REASON)
    return report
