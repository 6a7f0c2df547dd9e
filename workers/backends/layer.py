"""The shape of a model's layers, which decides how fast each precision is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ROW_TOKENS = 128
"""Tokens in a row of the measured layer: a usual pair."""

HEAD_WIDTH = 64


@dataclass(frozen=True)
class LayerShape:
    """Widths of a layer, rounded so that similar models share a measurement.

    Attributes
    ----------
    hidden
        Width of the hidden states; a multiple of `HEAD_WIDTH`.
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
        """The shape of a model's layers, with rows enough to keep `threads` busy for some milliseconds.

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
        """Floating-point operations of the matrix products of a batch."""
        products = 4 * self.hidden**2 + 2 * self.hidden * self.inner
        attention = 2 * ROW_TOKENS * self.hidden
        return 2 * self.rows * ROW_TOKENS * (products + attention)


def _rounded(width: int) -> int:
    """The nearest of 64, 128, 192, 256, 384, 512, 768, 1024, 1536 and so on, up to 6144.

    Larger widths count as 6144: wider layers behave alike, and a config may hold any number.
    """
    steps = [64, *(base << power for power in range(6) for base in (128, 192))]
    return min(steps, key=lambda step: abs(step - width))
