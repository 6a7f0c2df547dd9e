"""What runs the model: a `BackendKind` describes a backend, and loads models as a `Backend`."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from workers.backends.families import reads_first_token
from workers.backends.layer import LayerShape
from workers.models.tokens import Batch

Logits = npt.NDArray[np.float32]


DEVICES = {"cpu": "CPU", "cuda": "NVIDIA GPU", "mps": "Apple GPU"}
"""What people call the devices."""


class OutOfMemory(Exception):
    """A batch did not fit into the device's memory; a smaller one may."""


class DeviceLost(Exception):
    """The device cannot be used by this process any more; its work must be done by another."""


class Pending(Protocol):
    """A forward that was begun."""

    def result(self) -> Logits:
        """Wait for it: logits of shape ``[rows]``, in float32.

        Raises
        ------
        OutOfMemory
            The batch is too large for the device.
        DeviceLost
            The device failed.
        """
        ...


class Backend(Protocol):
    """A loaded model on a device.

    ``depth`` is how many forwards are best kept under way at a time: 1 where `submit` does the
    work itself, more where the device works while the next batch is made ready. ``bytes`` is the
    size of its weights.
    """

    name: str
    device: str
    precision: str
    depth: int
    bytes: int

    def submit(self, batch: Batch) -> Pending:
        """Begin a forward; raises `OutOfMemory` and `DeviceLost`."""
        ...


@dataclass(frozen=True)
class ModelFiles:
    """A model that is to be loaded.

    Attributes
    ----------
    source
        Directory or hub id.
    revision
        Commit on the hub.
    config
        The model's, from transformers, or what is kept of it.
    cache
        Folder for what is made from models.
    """

    source: str | Path
    revision: str | None
    config: Any
    cache: Path

    def classifier(self) -> Any:
        """The model as transformers has it, on the CPU, in float32, in evaluation mode."""
        from workers.backends.classifier import (  # torch and transformers: seconds
            load_classifier,
            load_config,
        )

        return load_classifier(self.source, self.revision, load_config(self.source, self.revision))


@dataclass(frozen=True)
class BackendKind:
    """All that is known of a backend before its package is imported.

    Each backend's package has one, named ``KIND``, and imports nothing heavy before `load` is called.

    Attributes
    ----------
    name
        By which settings ask for it.
    extra
        The extra of rankmill that installs it; default: its name.
    precisions
        What it runs, by device.
    load
        Loads a model on a device in a precision.
    packages
        What it imports that rankmill itself does not need.
    any_model
        Whether it runs every classifier of transformers, and not only families that `reads_first_token`.
    machines
        Those it runs on, by the names of `platform.machine`; none: on any.
    probe
        Makes something that runs a layer of a shape on the CPU in one of `probed`, in the backend's own
        arithmetic and on the worker's threads; without one, ``auto`` takes the backend only as a last resort.
    probed
        Precisions that `probe` takes, as far as the backend has them.
    lacks
        What else this machine lacks for it on a device in a precision; asked when `packages` are there.
    """

    name: str
    precisions: Mapping[str, tuple[str, ...]]
    load: Callable[[ModelFiles, str, str], Backend]
    packages: tuple[str, ...] = ()
    extra: str = ""
    any_model: bool = False
    machines: tuple[str, ...] = ()
    probe: Callable[[LayerShape, str], Callable[[], object]] | None = None
    probed: tuple[str, ...] = ("fp32", "bf16")
    lacks: Callable[[str, str], str | None] = lambda device, precision: None

    @property
    def installed_by(self) -> str:
        """The command that installs it."""
        return f"pip install 'rankmill[{self.extra or self.name}]'"

    def obstacle(self, config: Any, device: str, precision: str) -> str | None:
        """What keeps it from running a model in this precision on this device."""
        if device not in self.precisions:
            places = " and ".join(f"{DEVICES[each]}s" for each in self.precisions)
            return f"it runs on {places}, not on {device}"
        if self.machines and platform.machine() not in self.machines:
            return f"it does not run on {platform.machine()} machines"
        if not all(map(is_installed, self.packages)):
            return f"it is not installed ({self.installed_by})"
        lacking = self.lacks(device, precision)
        if lacking is None and not (self.any_model or reads_first_token(config)):
            return f"it is not known to score {config.model_type} models as PyTorch does"
        return lacking


def is_installed(package: str) -> bool:
    """Whether a package can be imported, without importing it."""
    return importlib.util.find_spec(package) is not None
