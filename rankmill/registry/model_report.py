"""What a worker of this host would make of a model, asked of a process that may import its libraries."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from pydantic import BaseModel

from rankmill.jobs.contract.errors import InputError, RankmillError
from rankmill.jobs.runtime.hosts import require_worker_packages
from rankmill.jobs.runtime.settings import Settings


class ReportFailed(RankmillError):
    """The process that looks at the model was killed."""


class ModelReport(BaseModel):
    """A model as a worker sees it.

    Attributes
    ----------
    model, revision
        Its name, and the commit on the hub.
    family, kind
        Transformers' model type, and how it makes a score.
    pooling
        Which tokens the score reads.
    outputs
        Names of the outputs.
    activation
        Dotted path of the function that it was saved with; ``None`` if it has none.
    max_length
        Most tokens of a pair.
    instruction, prompts
        The instruction in use, and the model's own by name.
    prompt
        What it reads of a pair; ``None``: the two texts.
    refused
        Why it cannot be scored with these settings; ``None`` if it can.
    device
        The device of this host.
    backends
        For each backend and precision, why it cannot run the model here; ``None`` if it can.
    """

    model: str
    revision: str | None
    family: str
    kind: str
    pooling: str
    outputs: tuple[str, ...]
    activation: str | None
    max_length: int
    instruction: str
    prompts: dict[str, str]
    prompt: str | None
    refused: str | None
    device: str
    backends: dict[str, dict[str, str | None]]


def model_report(settings: Settings) -> ModelReport:
    """Describe the settings' model.

    Raises
    ------
    InputError
        There is no such model, or its files are damaged.
    ReportFailed
        The process was killed.
    """
    require_worker_packages()
    request = {
        "spec": settings.spec().written(),
        "device": settings.device,
        "cache_dir": settings.cache_dir,
        "registry": settings.registry,
        "cache_bytes": settings.cache_bytes,
    }
    command = [sys.executable, "-P", "-m", "rankmill.workers.models.report"]
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, check=False)
    if not done.stdout:
        last = done.stderr.strip().rpartition("\n")[2]
        raise ReportFailed(f"looking at the model ended with status {done.returncode}: {last or 'no reason'}")
    answer: dict[str, Any] = json.loads(done.stdout)
    if "error" in answer:
        raise InputError(answer["error"])
    return ModelReport.model_validate(answer)
