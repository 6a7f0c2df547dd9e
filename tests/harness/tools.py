"""What tests need and may be missing: programs, packages of an extra, free ports; which are slow; threads."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

_REQUIRED = bool(os.environ.get("RANKMILL_REQUIRE_TOOLS"))  # read here: tests run without such variables


def tool(name: str, package: str) -> str:
    """Path of the program; skips the test without it, or fails it where tools are required."""
    found = shutil.which(name)
    if found is None:
        message = f"{name} is not installed; Debian has it in the package {package}"
        if _REQUIRED:
            pytest.fail(message)
        pytest.skip(message)
    return found


def needs_package(name: str) -> None:
    """Skip the test, or the module, without the package; unlike pytest's own way, without importing it."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed", allow_module_level=True)


def slow_but(variants: Iterable[Any], *quick: Any) -> list[Any]:
    """The variants of a test for ``parametrize``: all are in the slow tier but the `quick` ones."""
    return [each if each in quick else pytest.param(each, marks=pytest.mark.slow) for each in variants]


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def meanwhile(do: Callable[[], object], times: int) -> Iterator[Callable[[], bool]]:
    """Call `do` in another thread, `times` or until the block ends; gives whether it goes on."""
    over = threading.Event()

    def repeat() -> None:
        for _ in range(times):
            if over.is_set():
                return
            do()

    with ThreadPoolExecutor(1) as thread:
        calls = thread.submit(repeat)
        try:
            yield lambda: not calls.done()
        finally:
            over.set()
        calls.result()
