"""What runs the model. A backend is an object with the four members of `Backend`."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from workers.tokens import Batch

Logits = npt.NDArray[np.float32]


class OutOfMemory(Exception):
    """A batch did not fit into the device's memory; a smaller one may."""


class Backend(Protocol):
    """A loaded model on a device."""

    name: str
    device: str
    precision: str

    def forward(self, batch: Batch) -> Logits:
        """Logits of shape ``[rows]``, in float32.

        Raises
        ------
        OutOfMemory
            The batch is too large for the device.
        """
        ...
