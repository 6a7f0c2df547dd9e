"""What runs the model. A backend is an object with the members of `Backend`."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from workers.models.tokens import Batch

Logits = npt.NDArray[np.float32]


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
