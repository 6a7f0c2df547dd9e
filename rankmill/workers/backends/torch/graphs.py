"""CUDA graphs of packed forwards: hundreds of launches become one, so that no device waits for Python.

A graph is of one shape, so numbers of tokens and rows are rounded up. Nobody waits for one: a shape is
recorded when it has come several times, which takes about as long as a few of its forwards. It is kept if it
gave the logits of its forward, and was no slower: each launch that it spares is one less for Python's lock.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch

from rankmill.workers.backends.torch.packed import PackedRows, PackedShape
from rankmill.workers.backends.varlen import PackedInput

Forward = Callable[[PackedInput], torch.Tensor]

_WORTH = 8
"""A shape is recorded when it comes for the eighth time."""

_MOST = 32
"""Graphs at most: each has its own list of launches; their memory for states is one."""

_STEPS = 8
"""Token counts between a power of two and the next."""

_LEAST_LONGEST = 32

_LONG = 0.02
"""Forwards of so many seconds hide their launches, and to record them would keep others waiting."""

_AS_GOOD = 1.02
"""A graph may take so many times as long as its forward did: it spares the host all launches."""

logger = logging.getLogger(__name__)


class Recorded(Protocol):
    """A forward that reads a buffer on the device."""

    buffer: torch.Tensor

    def replay(self) -> torch.Tensor:
        """Begin the forward with what is in the buffer now; returns its logits."""
        ...


class CudaGraph:
    """A forward as a CUDA graph.

    Parameters
    ----------
    forward
        The network's.
    shape
        Of the rows.
    buffer
        The numbers of such rows, on the device.
    """

    _pool: Any = None
    """Memory that all graphs use for their states: only one of them runs at a time."""

    def __init__(self, forward: Forward, shape: PackedShape, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            forward(shape.taken_apart(buffer))  # libraries prepare themselves at their first call
        torch.cuda.current_stream().wait_stream(beside)
        CudaGraph._pool = CudaGraph._pool or torch.cuda.graph_pool_handle()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=CudaGraph._pool, capture_error_mode="thread_local"):
            self._logits = forward(shape.taken_apart(buffer))

    def replay(self) -> torch.Tensor:
        self._graph.replay()
        return self._logits


class Graphs:
    """The graphs of a network, by shape.

    Parameters
    ----------
    forward
        Packed rows to logits ``[scores, outputs]``.
    put
        Brings a buffer to the device.
    record, wait
        How a forward is recorded, and how to wait for the device.
    """

    def __init__(
        self,
        forward: Forward,
        put: Callable[[Any], torch.Tensor],
        record: Callable[[Forward, PackedShape, torch.Tensor], Recorded] = CudaGraph,
        wait: Callable[[], None] = torch.cuda.synchronize,
    ) -> None:
        self._forward, self._put, self._record, self._wait = forward, put, record, wait
        self._seen: Counter[PackedShape] = Counter()
        self._graphs: dict[PackedShape, Recorded | None] = {}
        self._works = True

    @property
    def kept(self) -> int:
        """How many graphs there are."""
        return sum(graph is not None for graph in self._graphs.values())

    def begin(self, rows: PackedRows) -> torch.Tensor | None:
        """Begin the forward of `rows` by a graph; ``None`` if there is none of their shape.

        The logits ``[scores, outputs]`` are valid until the next one begins on the device.
        """
        if rows.keys is not None or not self._works:
            return None
        shape = rounded(rows.shape)
        if shape not in self._graphs and len(self._graphs) < _MOST:
            self._seen[shape] += 1
            if self._seen[shape] >= _WORTH:
                self._graphs[shape] = self._recorded(rows, shape)
        graph = self._graphs.get(shape)
        if graph is None:
            return None
        graph.buffer.copy_(self._put(rows.filled(shape)), non_blocking=True)
        return graph.replay()[: len(rows.read)]

    def _recorded(self, rows: PackedRows, shape: PackedShape) -> Recorded | None:
        """A graph of this shape, if it is right and faster; `rows` are an example."""
        exact = self._put(rows.filled(rows.shape))
        try:
            eager, expected = self._timed(lambda: self._forward(rows.shape.taken_apart(exact)))
            if eager > _LONG:
                return None
            graph = self._record(self._forward, shape, self._put(rows.filled(shape)))
            graphed, found = self._timed(graph.replay)
        except RuntimeError as error:  # memory is short, or the model asks the device for something
            self._wait()  # raises if the device is lost
            self._works = False
            logger.info("no graphs of forwards: %s", error)
            return None
        if not torch.allclose(found[: len(expected)], expected, rtol=_close(expected), atol=_close(expected)):
            logger.warning("a graph of %d tokens gives other logits than its forward: left out", shape.tokens)
            return None
        logger.debug("graph of %s: %.2g s, the forward %.2g s", shape, graphed, eager)
        return graph if graphed < _AS_GOOD * eager else None

    def _timed(self, run: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
        """The shorter of two times (s), and what came out."""
        times = []
        for _ in range(2):
            self._wait()
            started = time.perf_counter()
            found = run()
            self._wait()
            times.append(time.perf_counter() - started)
        return min(times), found


def _close(logits: torch.Tensor) -> float:
    """Other sizes may take other kernels, which round otherwise."""
    return 1e-4 if logits.device.type == "cpu" else 0.05


def rounded(shape: PackedShape) -> PackedShape:
    """A shape that is as large or larger, of which there are few.

    >>> rounded(PackedShape(tokens=1000, rows=11, scores=11, longest=90, longest_keys=90, types=False))
    PackedShape(tokens=1024, rows=16, scores=16, longest=128, longest_keys=128, types=False, keys=None)
    """
    step = max((1 << (shape.tokens.bit_length() - 1)) // _STEPS, 1)
    rows = 1 << (shape.rows - 1).bit_length()
    longest = max(1 << (shape.longest - 1).bit_length(), _LEAST_LONGEST)
    tokens = -(-shape.tokens // step) * step
    return replace(shape, tokens=tokens, rows=rows, scores=rows, longest=longest, longest_keys=longest)
