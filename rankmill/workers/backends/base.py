"""Backends run models: a `BackendKind` describes a backend, and a `Backend` is a model that a backend has
loaded.

A package adds a backend by an entry point of the group ``rankmill.backends``, which names its `BackendKind`.
"""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from rankmill.jobs.runtime.installation import install_line
from rankmill.workers.batches.layout import PLAIN, ModelLayout
from rankmill.workers.batches.tokens import Batch

Logits = npt.NDArray[np.float32]


DEVICES = {"cpu": "CPU", "cuda": "NVIDIA GPU", "mps": "Apple GPU"}


class OutOfMemory(Exception):
    """The batch did not fit into the device's memory; a smaller batch may fit."""


class DeviceLost(Exception):
    """The GPU or other device can no longer be used by this process; another process must do the work."""


def is_panic(error: BaseException) -> bool:
    """Return whether an error comes from a panic in a package that is written in Rust, such as tokenizers.
    Errors from panics do not inherit from `Exception`.
    """
    return type(error).__name__ == "PanicException"


class Pending(Protocol):
    """A forward (one run of a model over a batch) that is in progress."""

    def result(self) -> Logits:
        """Wait for the forward; return its logits ``[rows]``, or ``[rows, outputs]`` for several outputs, in
        float32.

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

    Attributes
    ----------
    depth
        The best number of forwards in progress, which is 1 if `submit` itself computes, and more if the
        device computes while the worker prepares the next batch.
    bytes
        Size of the weights.
    shares_prefixes
        Whether tokens that several rows begin with are computed only once (`Batch.groups`).
    packs
        Whether rows are computed end to end, without padding.
    pieces
        A batch is cut into at most this many pieces (`cut_batch`); each piece is padded by itself.
    """

    name: str
    device: str
    precision: str
    depth: int
    bytes: int
    shares_prefixes: bool = False
    packs: bool = False
    pieces: int = 1

    def submit(self, batch: Batch) -> Pending:
        """Begin the forward of a batch; raises `OutOfMemory` and `DeviceLost`."""
        ...


@dataclass(frozen=True)
class ModelFiles:
    """What a backend needs to load a model.

    Attributes
    ----------
    source
        Directory or hub id.
    revision
        Commit on the hub, or the digest of the directory's content.
    config
        The model's config from transformers, or the part of it that is cached.
    cache
        Folder for files that are derived from models.
    layout
        How the model is applied to a pair.
    answers
        The token ids of a language model's answers yes and no; the second is ``None`` if only yes counts.
    check_unchanged
        Raises `WorkerError` if the files have changed since `revision` was computed.
    alone
        Whether to compute each row by itself on one thread (`rankmill.workers.backends.alone`).
    copies
        Digests of files in the cache that are derived from the model. A backend that loads such a file
        instead of the model's own adds the file's digest here.
    """

    source: str | Path
    revision: str | None
    config: Any
    cache: Path
    layout: ModelLayout = PLAIN
    answers: tuple[int, int | None] | None = None
    check_unchanged: Callable[[], None] = lambda: None
    alone: bool = False
    copies: list[str] = field(default_factory=list)

    def classifier(self) -> Any:
        """Load the model as a sequence classifier of transformers, on the CPU, in float32 and in evaluation
        mode.
        """
        from rankmill.workers.backends.classifier import load_classifier, load_config

        return load_classifier(self.source, self.revision, load_config(self.source, self.revision))


ROW_TOKENS = 128
"""To measure the speed of a backend, a layer is run with rows of this many tokens. A usual pair has about
this many.
"""

HEAD_WIDTH = 64


@dataclass(frozen=True)
class LayerShape:
    """Size of the layer that a backend runs to measure its speed. Widths are rounded, so that similar models
    share one measurement.

    Attributes
    ----------
    hidden
        Width of the hidden states, which is a multiple of `HEAD_WIDTH`.
    inner
        Width inside the feed-forward part.
    rows
        Rows of `ROW_TOKENS` tokens in a batch.
    """

    hidden: int
    inner: int
    rows: int

    @classmethod
    def of(cls, config: Any, threads: int) -> LayerShape:
        """Return the shape of a model's layers, with enough rows to keep `threads` CPU threads busy for some
        milliseconds.

        Parameters
        ----------
        config
            The model's config, from transformers.
        threads
            CPU threads that share the work.
        """
        hidden = _rounded(getattr(config, "hidden_size", None) or 768)
        inner = getattr(config, "hidden_dim", None) or getattr(config, "intermediate_size", None)
        shape = cls(hidden, _rounded(inner or 4 * hidden), 1)
        rows = round(1e9 * threads / shape.operations)
        return cls(shape.hidden, shape.inner, min(max(rows, 1), 16))

    @property
    def operations(self) -> int:
        """Number of floating-point operations in the matrix products when the layer runs once."""
        products = 4 * self.hidden**2 + 2 * self.hidden * self.inner
        attention = 2 * ROW_TOKENS * self.hidden
        return 2 * self.rows * ROW_TOKENS * (products + attention)


def _rounded(width: int) -> int:
    """Round the width of a layer to the nearest of 64, 128, 192, 256, 384, 512, 768, 1024, 1536 and so on, up
    to 6144.

    Larger widths count as 6144, because wider layers behave alike and a config may contain any number.
    """
    steps = [64, *(base << power for power in range(6) for base in (128, 192))]
    return min(steps, key=lambda step: abs(step - width))


ROW, MATRIX = 0, -1
"""Numbers for a field of `Rounding`: `ROW` means one scale for each row of a matrix, and `MATRIX` one for all
of it.
"""


class Rounding(NamedTuple):
    """How a backend rounds the weights of linear layers, and the inputs of these layers, to 8 or 4 bits.

    Each field tells how many values have a common scale: a number, `ROW` or `MATRIX`. ``None`` means that the
    backend does not round the weights, or the inputs.
    """

    weights: int | None
    inputs: int | None


def is_rounded(precision: str) -> bool:
    """Return whether a model's linear layers compute in 8 or 4 bits in this precision. If so, the backend's
    `Rounding` applies.
    """
    return precision == "fp8" or precision.startswith("int")


@dataclass(frozen=True)
class BackendKind:
    """Describes a backend, without importing the backend's packages.

    An entry point of ``rankmill.backends`` names a `BackendKind`. The module that contains it must import
    nothing heavy; the functions of the `BackendKind` may.

    Attributes
    ----------
    name
        Name in the settings, which is also the entry point's name.
    preference
        Where ``auto`` does not measure speeds, it tries backends with low numbers first.
    extra
        The extra of rankmill that installs `packages`. Empty if the package with the backend installs them.
    precisions
        Supported precisions, by device.
    load
        Loads a model on a device in a precision.
    packages
        Packages that the backend imports and that rankmill itself does not need.
    added
        Further packages that a precision needs, by precision.
    for_tests
        Devices on which ``auto`` does not take the backend, because other backends are far faster there.
    register
        Adds model types that transformers lacks; called before a model's config is read.
    families
        Model types that the backend can run, as classifiers with one output. ``None`` if it runs any network.
    measured
        Model types whose classifiers with one output run as fast as `timed_layer` says; ``None`` means all
        models. For any other model, ``auto`` prefers other backends.
    machines
        Machines that the backend runs on, as `platform.machine` names them; empty means any.
    timed_layer
        Gets the shape of a layer, and one of the `timed` precisions. Returns a function that runs the layer
        once on the CPU, on the worker's threads, as the backend would compute it. On a CPU, ``auto`` takes a
        backend without `timed_layer` only as a last resort.
    timed
        Precisions that `timed_layer` accepts, if the backend supports them.
    rounding
        How the backend rounds to 8 and 4 bits. Transformers' model is rounded in this way too, to find out
        how far rounded scores may be off (`rankmill.workers.engine.proving`).
    int8
        Returns the names of the kinds of int8 (ways to compute in 8 bits) that this CPU supports. The
        precision ``int8`` means the first kind, unless the speeds of the kinds are measured.
    concurrent
        Whether several threads may call `Backend.submit` at the same time; each computes in its own thread.
    lacks
        Returns what this machine lacks for a device and a precision, or ``None``. This function is called
        only if `packages` are installed.
    """

    name: str
    precisions: Mapping[str, tuple[str, ...]]
    load: Callable[[ModelFiles, str, str], Backend]
    packages: tuple[str, ...] = ()
    added: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    extra: str = ""
    preference: int = 100
    for_tests: frozenset[str] = frozenset()
    register: Callable[[], None] = lambda: None
    families: frozenset[str] | None = None
    measured: frozenset[str] | None = None
    machines: tuple[str, ...] = ()
    timed_layer: Callable[[LayerShape, str], Callable[[], object]] | None = None
    timed: tuple[str, ...] = ("fp32", "bf16")
    rounding: Rounding | None = None
    int8: Callable[[], tuple[str, ...]] = lambda: ("int8",)
    concurrent: bool = False
    lacks: Callable[[str, str], str | None] = lambda device, precision: None

    def is_measured(self, config: Any, *, plain: bool = True) -> bool:
        """Return whether the speed of `timed_layer` tells how fast this backend runs a model with this
        config.
        """
        return self.measured is None or (plain and config.model_type in self.measured)

    def packages_of(self, precision: str) -> tuple[str, ...]:
        """Return the names of the packages that compute in a precision. The versions of these packages can
        change the scores.
        """
        return self.packages + self.added.get(precision, ())

    def obstacle(self, config: Any, device: str, precision: str, *, plain: bool = True) -> str | None:
        """Return why the backend cannot run a model on this device in this precision; ``None`` if it can.

        `plain` says whether the model is a sequence classifier of transformers with one output.
        """
        if device not in self.precisions:
            places = " and ".join(f"{DEVICES[name]}s" for name in self.precisions)
            return f"it runs on {places}, not on {device}"
        if self.machines and platform.machine() not in self.machines:
            return f"it does not run on {platform.machine()} machines"
        if not all(map(is_installed, self.packages)):
            how = install_line(self.extra) if self.extra else f"it needs {', '.join(self.packages)}"
            return f"it is not installed ({how})"
        try:
            lacking = self.lacks(device, precision)
        except ImportError as error:
            lacking = f"it cannot be imported ({error})"
        if lacking is None and self.families is not None and not plain:
            return "it runs only sequence classifiers with one output"
        if lacking is None and self.families is not None and config.model_type not in self.families:
            return f"it has no modules for {config.model_type} models"
        return lacking


def is_installed(package: str) -> bool:
    """Return whether a package can be imported, without importing it."""
    return importlib.util.find_spec(package) is not None
