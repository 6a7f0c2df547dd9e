"""The trial of a model before it is pushed: a process loads it, and scores the shipped pairs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from pydantic import BaseModel

from rankmill.jobs.contract.errors import InputError, RankmillError
from rankmill.jobs.runtime.hosts import require_worker_packages
from rankmill.jobs.runtime.settings import Settings


class TrialFailed(RankmillError):
    """The process that tries a model was killed."""


class Trial(BaseModel):
    """A model that can be scored: transformers' model type, and what ran it here."""

    family: str
    backend: str
    precision: str


def try_model(folder: Path, settings: Settings, *, seconds: float | None = None) -> Trial:
    """Load the model in a folder, and score the shipped pairs, within `seconds`.

    Raises
    ------
    InputError
        It cannot be scored; the message says why.
    TrialFailed
        The process was killed, as the system does when memory runs out, or the time was over.
    """
    require_worker_packages()
    spec = settings.spec().model_copy(
        update={"model": str(folder.resolve()), "revision": None, "precision": "fp32"}
    )
    request = {"spec": spec.written()}
    command = [sys.executable, "-P", "-m", "rankmill.workers.offline.trial"]
    try:
        done = subprocess.run(
            command, input=json.dumps(request), capture_output=True, text=True, check=False, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        raise TrialFailed(f"the trial of {folder} took longer than {seconds:g} s") from None
    if not done.stdout:
        last = done.stderr.strip().rpartition("\n")[2]
        raise TrialFailed(f"the trial of {folder} ended with status {done.returncode}: {last or 'no reason'}")
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise InputError(f"{folder} cannot be pushed: {answer['error']}")
    return Trial.model_validate(answer)
