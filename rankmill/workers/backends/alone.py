"""Computes deterministic scores: each row has a forward of its own, without padding and on one thread.

A library chooses its kernel by the shape of the input and by the number of threads, and kernels add up in
different orders. If a row is computed by itself on one thread, only the row decides the bits of its logits.
On a CPU, several rows are computed at the same time, one on each core of the worker.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any

import numpy as np

from rankmill.jobs.runtime.hosts import cpu_flags, cpu_model
from rankmill.jobs.system import system
from rankmill.workers.backends.base import Backend, BackendKind, Logits, Pending
from rankmill.workers.batches.tokens import Batch, rows_alone
from rankmill.workers.host.device import device_name, forced_kernels, threads
from rankmill.workers.host.disk_cache import digest, version


class Alone(Backend):
    """A `Backend` that computes each row of a batch separately.

    Parameters
    ----------
    backend
        The model, loaded from `ModelFiles` whose ``alone`` is true.
    kind
        The backend's `BackendKind`.
    """

    def __init__(self, backend: Backend, kind: BackendKind) -> None:
        self.name, self.device, self.precision = backend.name, backend.device, backend.precision
        self.bytes = backend.bytes
        self.kind = _kind(backend, kind)
        """A line with everything that decides the bits of a model's logits for a row: backend, precision,
        device, CPU or GPU, and the versions of packages.
        """
        self._backend = backend
        self._lanes = _lanes(threads()) if kind.concurrent and backend.device == "cpu" else None
        self.depth = 2 if self._lanes else backend.depth

    def submit(self, batch: Batch) -> RowForwards:
        started: list[Any] = []
        try:
            for row in rows_alone(batch):
                lanes = self._lanes
                started.append(lanes.submit(self._score, row) if lanes else self._backend.submit(row))
        except Exception:
            # wait for the rows that have begun, so that no later forward runs beside them
            with suppress(Exception):
                RowForwards(started).result()
            raise
        return RowForwards(started)

    def _score(self, row: Batch) -> Logits:
        return self._backend.submit(row).result()


class RowForwards:
    """The forwards in progress for a batch, one for each row."""

    def __init__(self, started: Sequence[Pending]) -> None:
        self._started = started

    def result(self) -> Logits:
        """Return the batch's logits, of shape ``[rows]`` or ``[rows, outputs]``.

        Waits for all rows, and then raises the first error of `Pending.result`, if there is one.
        """
        logits: list[Logits] = []
        errors: list[Exception] = []
        for forward in self._started:
            try:
                logits.append(forward.result())
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return np.concatenate(logits)


def _lanes(count: int) -> Executor:
    """Start `count` threads that compute rows at the same time. PyTorch uses no further threads for a row."""
    all_started = threading.Barrier(count)
    lanes = system.Executor(count, thread_name_prefix="lane", initializer=_without_help)
    for waiting in [lanes.submit(all_started.wait) for _ in range(count)]:
        waiting.result()
    if torch := sys.modules.get("torch"):
        # Set the number of threads with which PyTorch computes for this thread, and for threads that begin
        # later. For the threads in `lanes`, the number stays 1.
        torch.set_num_threads(threads())
    return lanes


def _without_help() -> None:
    """Make PyTorch compute in the calling thread only."""
    if torch := sys.modules.get("torch"):
        # Do not remove this call: without it, PyTorch would later replace the 1 by its default number of
        # threads.
        torch.get_num_threads()
        torch.set_num_threads(1)


def _kind(backend: Backend, kind: BackendKind) -> str:
    packages = dict.fromkeys(("rankmill", "torch", "transformers", *kind.packages_of(backend.precision)))
    flags = digest(sorted(cpu_flags()))[:8]
    where = [device_name(backend.device)]
    where += [f"{cpu_model()} with instructions {flags}"] if backend.device == "cpu" else []
    made_by = [f"{name} {version(name)}" for name in packages]
    parts = [f"{backend.name} {backend.precision}", backend.device, *where, *forced_kernels(), *made_by]
    return ", ".join(parts)
