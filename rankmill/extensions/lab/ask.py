"""Runs tasks on a model in a separate process, so that the calling process does not import torch.

The started process runs `rankmill.extensions.lab.offline`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from rankmill.jobs.contract.errors import InputError, RankmillError
from rankmill.jobs.runtime.hosts import require_worker_packages
from rankmill.jobs.runtime.settings import Settings


class ProcessFailed(RankmillError):
    """Raised if a process that works on a model gave no answer, for example because memory or time ran
    out.
    """


def ask(
    task: Literal["trial", "report", "prove", "calibrate"],
    request: Mapping[str, Any],
    what: str,
    settings: Settings,
    *,
    environ: Mapping[str, str] = MappingProxyType({}),
    seconds: float | None = None,
) -> dict[str, Any]:
    """Run a task on a model in a new process, and return its answer.

    Parameters
    ----------
    task
        Name of a module of `rankmill.extensions.lab.offline`.
    request
        The request, with JSON's types; the module describes it.
    what
        What the process does, for error messages, such as ``calibration``.
    settings
        Settings for the process, passed as environment variables.
    environ
        Further environment variables of the process.
    seconds
        The longest time for the answer; ``None`` means no limit.

    Raises
    ------
    ConfigError
        A package of a worker is missing.
    InputError
        The process has answered with an error.
    ProcessFailed
        The process ended without an answer, or the time was over.
    """
    require_worker_packages()
    command = [sys.executable, "-P", "-m", "rankmill.extensions.lab.offline", task]
    try:
        done = subprocess.run(
            command, input=json.dumps(request), capture_output=True, text=True, check=False, timeout=seconds,
            env={**os.environ, **settings.environ(), **environ},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ProcessFailed(f"{what} took longer than {seconds:g} s") from None
    if not done.stdout:
        last = done.stderr.strip().rpartition("\n")[2]
        raise ProcessFailed(f"{what} ended with status {done.returncode}: {last or 'no reason given'}")
    answer: dict[str, Any] = json.loads(done.stdout)
    if "error" in answer:
        raise InputError(answer["error"])
    return answer
