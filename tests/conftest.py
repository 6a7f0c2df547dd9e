"""Fixtures for tests that run real servers, real worker processes and small real models.

`server` is an empty Valkey server of the test's own, `workers` starts ScoringWorkers on it. A test that
only wants scores takes `shared_queue`, a server and a worker for the whole session; one that only needs
a server and tidies up after itself takes `shared_server`. `tiny_model` is a model for all of them. They
and the functions beside them are in `tests.harness`: servers, processes, models.

Under pytest-xdist each process has its own session: servers, workers and ports are not shared, what is
made from models is.
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import signal
import sys
from collections.abc import Generator, Iterator
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint
from inspect import isclass, iscode, isfunction, ismodule, unwrap
from itertools import chain
from typing import Any

import pytest
from hypothesis import settings

from rankmill import plugins
from rankmill.jobs.runtime.logs import OURS, RQ, JsonLines
from rankmill.workers.host.device import use_threads
from tests.harness.auto import force_auto
from tests.harness.environ import BIN, ENVIRON, FORKS, QUICK_LEASE
from tests.harness.preloaded import install, start_forks
from tests.harness.processes import (
    FAILED,
    Outcome,
    StartExporter,
    StartRunner,
    StartWorker,
    run_command,
    score_file,
    start_command,
    start_worker,
    wait_for,
)
from tests.harness.servers.valkey import Server, serve

__all__ = [
    "BIN",
    "ENVIRON",
    "QUICK_LEASE",
    "Outcome",
    "Server",
    "StartExporter",
    "StartRunner",
    "StartWorker",
    "run_command",
    "score_file",
    "serve",
    "start_command",
    "start_worker",
    "wait_for",
]
pytest_plugins = [
    "tests.harness.servers.buckets",
    "tests.harness.held",
    "tests.harness.models.tiny",
    "tests.harness.processes",
    "tests.harness.servers.valkey",
]
_HAS_TORCH = importlib.util.find_spec("torch") is not None
if not _HAS_TORCH:
    pytest_plugins.append("tests.harness.without_torch")

# A shell that runs the suite in the background has it ignore Ctrl-C, and so would all that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("suite", deadline=None)  # a busy machine is no failure
settings.load_profile("suite")
install()
force_auto()
use_threads(1)  # the suite's workers are processes; more threads would fight them


_TOLERANT = {"allclose", "approx", "assert_allclose"}


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what compares scores within a tolerance: it has to pass whatever ``auto`` means.

    Modules whose tests say their precision, or have no model, are marked ``own_precision`` and run once.
    """
    if not isinstance(item, pytest.Function) or item.get_closest_marker("own_precision"):
        return
    fixtures = chain.from_iterable(item._fixtureinfo.name2fixturedefs.values())
    given = item.callspec.params.values() if hasattr(item, "callspec") else ()
    parts = (item.function, *(each.func for each in fixtures), *given)
    if any(_is_tolerant(each) for each in parts if _is_of_tests(each)):
        item.add_marker(pytest.mark.scores)


@cache
def _is_tolerant(function: Any) -> bool:
    """Whether a function or class of the tests, or one that it names, compares within a tolerance."""
    found, ahead = {function}, [function]
    while ahead:
        each = ahead.pop()
        names = set(_names(each))
        if names & _TOLERANT:
            return True
        of_module = vars(sys.modules.get(each.__module__, pytest))
        spaces = [of_module, *(vars(of_module[name]) for name in names if ismodule(of_module.get(name)))]
        named = {space[name] for space in spaces for name in names if _is_of_tests(space.get(name))}
        ahead += named - found
        found |= named
    return False


def _is_of_tests(named: object) -> bool:
    return (isfunction(named) or isclass(named)) and named.__module__.startswith("tests.")


def _names(named: Any) -> Iterator[str]:
    """All names in the code of a function or of a class's methods."""
    functions = filter(isfunction, vars(named).values()) if isclass(named) else [named]
    inner = (each.hypothesis.inner_test if hasattr(each, "hypothesis") else each for each in functions)
    ahead = [unwrap(each).__code__ for each in inner]
    while ahead:
        code = ahead.pop()
        yield from code.co_names
        ahead += [each for each in code.co_consts if iscode(each)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Let fixtures know at their end that the test has failed: see `tests.harness.processes.workers`."""
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


def pytest_collection_finish() -> None:
    """Spare the garbage collector what stays for good: the libraries and the tests, a million objects."""
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    """Start one process that forks for all of pytest-xdist's; it imports while they do."""
    if _HAS_TORCH and config.getoption("numprocesses", None) and not config.getoption("collectonly"):
        os.environ[FORKS] = start_forks()


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("RANKMILL_", "REDIS_URL")):
            monkeypatch.delenv(name)


_LOGGERS = [logging.getLogger(name) for name in (None, OURS, *RQ)]
_LOGGING = [(logger, logger.level, logger.handlers[:]) for logger in _LOGGERS]


@pytest.fixture
def without_extensions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The core alone: no extension adds anything to it."""
    every, ours = plugins._named, plugins._ours

    def is_core(point: EntryPoint) -> bool:
        return not point.value.startswith("rankmill.extensions")

    def named(seam: plugins.Seam) -> dict[str, list[EntryPoint]]:
        return {name: points for name, points in every(seam).items() if all(map(is_core, points))}

    for module in ("rankmill.cli.status", "rankmill.cli.wait"):  # they make options of extensions' settings
        import_module(module)
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(plugins, "_named", named)
    monkeypatch.setattr(plugins, "_ours", lambda: filter(is_core, ours()))


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Commands that run in this process, also in fixtures of modules, set its logging up; no test sees it."""
    _restore_logging()
    yield
    _restore_logging()


def _restore_logging() -> None:
    for logger, level, handlers in _LOGGING:
        logger.setLevel(level)
        of_pytest = [each for each in logger.handlers if type(each).__module__.startswith("_pytest.")]
        logger.handlers[:] = [*handlers, *of_pytest]
    logging.captureWarnings(capture=False)
    if isinstance(sys.stderr, JsonLines):
        sys.stderr = sys.stderr.plain
