"""Asks another process that may import a worker's libraries, which this one never does
(`rankmill.workers.offline`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Literal

from rankmill.jobs.contract.errors import InputError, RankmillError
from rankmill.jobs.runtime.settings import Settings, WorkerSettings


class ProcessFailed(RankmillError):
    """The process ended without an answer, for instance because the system killed it when memory ran out."""


def ask(
    task: Literal["trial", "report", "prove", "calibrate"],
    request: Mapping[str, Any],
    what: str,
    *,
    environ: Mapping[str, str] | None = None,
    seconds: float | None = None,
) -> dict[str, Any]:
    """Answer a request, both of JSON's types, within `seconds`; `what` says what the process does, for
    errors.

    Raises
    ------
    InputError
        The answer is an error.
    ProcessFailed
        The process ended without an answer.
    """
    command = [sys.executable, "-P", "-m", "rankmill.workers.offline", task]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(request),
            capture_output=True,
            text=True,
            check=False,
            env=environ,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        raise ProcessFailed(f"{what} took longer than {seconds:g} s") from None
    if not done.stdout:
        last = done.stderr.strip().rpartition("\n")[2]
        raise ProcessFailed(f"{what} ended with status {done.returncode}: {last or 'no reason given'}")
    answer: dict[str, Any] = json.loads(done.stdout)
    if "error" in answer:
        raise InputError(answer["error"])
    return answer


def worker_settings(settings: Settings) -> dict[str, Any]:
    """The settings of workers, for a request."""
    return settings.model_dump(include=set(WorkerSettings.model_fields))
