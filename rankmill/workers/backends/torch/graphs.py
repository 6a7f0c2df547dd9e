"""Records the forwards of packed rows as CUDA graphs. The launch of a graph replaces hundreds of launches, so
that the device does not wait for Python.

A graph has one shape, so numbers of tokens and rows are rounded up. Recording takes about as long as a few
forwards, so a shape is recorded only after it has occurred several times. The graph is kept if it gives the
same logits as its forward and is about as fast or faster. A graph also takes Python's lock less often than a
forward.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rankmill.workers.backends.torch.packed import PackedRows, PackedShape
from rankmill.workers.backends.varlen import PackedInput

Forward = Callable[[PackedInput], Tensor]

_WORTH = 8
"""A CUDA graph for a shape of packed rows is recorded once the shape has occurred this many times."""

_MOST = 32
"""A model has at most this many CUDA graphs; beyond them, no further shape is recorded. Each graph has a list
of launches of its own, but all share the memory for hidden states.
"""

_STEPS = 8
"""A CUDA graph's number of tokens is rounded up to one of this many values between two powers of two: for
example, 1,025 tokens to 1,152, and 1,153 tokens to 1,280.
"""

_LEAST_LONGEST = 32

_LONG = 0.02
"""A forward that takes more than this many seconds is not recorded as a CUDA graph. The launches of such a
slow forward are a small part of its time, and the recording would delay other forwards too much.
"""

_AS_GOOD = 1.02
"""A CUDA graph is kept if it takes less than this many times as long as the forward without a graph. A graph
that is a little slower is kept too, because it saves the host the launches of the forward.
"""

logger = logging.getLogger(__name__)


class CudaGraph:
    """A forward that is recorded as a CUDA graph. It reads its input from a buffer on the device.

    Parameters
    ----------
    forward
        The network's forward.
    shape
        The shape of the rows.
    buffer
        A buffer on the device with rows of this shape.
    """

    _pool: Any = None
    """Memory that all CUDA graphs share for hidden states, because only one of them runs at a time."""

    def __init__(self, forward: Forward, shape: PackedShape, buffer: Tensor) -> None:
        self.buffer = buffer
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            forward(shape.taken_apart(buffer))  # not recorded: libraries initialize themselves at first
        torch.cuda.current_stream().wait_stream(beside)
        CudaGraph._pool = CudaGraph._pool or torch.cuda.graph_pool_handle()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=CudaGraph._pool, capture_error_mode="thread_local"):
            self._logits = forward(shape.taken_apart(buffer))

    def replay(self) -> Tensor:
        """Begin the forward of the rows that `buffer` has now, and return their logits."""
        self._graph.replay()
        return self._logits


class Graphs:
    """The CUDA graphs of a network, one for each shape of packed rows.

    Parameters
    ----------
    forward
        The network's forward, from packed rows to logits ``[scores, outputs]``.
    put
        Copies a buffer to the device.
    """

    def __init__(self, forward: Forward, put: Callable[[Any], Tensor]) -> None:
        self._forward, self._put = forward, put
        self._seen: Counter[PackedShape] = Counter()
        self._graphs: dict[PackedShape, CudaGraph | None] = {}
        self._works = True

    @property
    def kept(self) -> int:
        return sum(graph is not None for graph in self._graphs.values())

    def begin(self, rows: PackedRows) -> Tensor | None:
        """Begin the forward of `rows` by a CUDA graph, or return ``None`` if there is none for their shape.

        A graph is recorded once a shape has occurred often enough. The logits ``[scores, outputs]`` are valid
        until the next graph begins on the device.
        """
        if rows.keys is not None or not self._works:
            return None
        shape = rounded(rows.shape)
        if shape not in self._graphs and self.kept < _MOST:
            self._seen[shape] += 1
            if self._seen[shape] >= _WORTH:
                self._graphs[shape] = self._recorded(rows, shape)
        graph = self._graphs.get(shape)
        if graph is None:
            return None
        graph.buffer.copy_(self._put(rows.filled(shape)), non_blocking=True)
        return graph.replay()[: len(rows.read)]

    def _recorded(self, rows: PackedRows, shape: PackedShape) -> CudaGraph | None:
        """Record a CUDA graph for a shape, with `rows` as an example.

        Returns ``None`` if recording fails, or if the graph is too slow or has other logits than the forward.
        """
        exact = self._put(rows.filled(rows.shape))
        try:
            eager, expected = self._timed(lambda: self._forward(rows.shape.taken_apart(exact)))
            if eager > _LONG:
                return None
            graph = CudaGraph(self._forward, shape, self._put(rows.filled(shape)))
            graphed, ours = self._timed(graph.replay)
        except RuntimeError as error:  # for example, memory is short
            torch.cuda.synchronize()  # raises an error if the device is lost
            self._works = False
            logger.info("forwards do not become CUDA graphs: %s", error)
            return None
        if not torch.allclose(ours[: len(expected)], expected, rtol=_close(expected), atol=_close(expected)):
            logger.warning("a graph of %d tokens gives other logits than its forward: left out", shape.tokens)
            return None
        logger.debug("graph of %s: %.2g s, the forward %.2g s", shape, graphed, eager)
        return graph if graphed < _AS_GOOD * eager else None

    def _timed(self, run: Callable[[], Tensor]) -> tuple[float, Tensor]:
        times = []
        for _ in range(2):
            torch.cuda.synchronize()
            started = time.perf_counter()
            output = run()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
        return min(times), output


def _close(logits: Tensor) -> float:
    """Return the allowed difference between logits of a CUDA graph and of a forward without a graph.

    The logits differ because the graph's sizes are rounded up.
    """
    return 1e-4 if logits.device.type == "cpu" else 0.05


def rounded(shape: PackedShape) -> PackedShape:
    """Round the numbers of tokens and rows in a shape up, so that few different shapes remain.

    >>> rounded(PackedShape(tokens=1000, rows=11, scores=11, longest=90, longest_keys=90, types=False))
    PackedShape(tokens=1024, rows=16, scores=16, longest=128, longest_keys=128, types=False, keys=None)
    """
    step = max((1 << (shape.tokens.bit_length() - 1)) // _STEPS, 1)
    rows = 1 << (shape.rows - 1).bit_length()
    longest = max(1 << (shape.longest - 1).bit_length(), _LEAST_LONGEST)
    tokens = -(-shape.tokens // step) * step
    return replace(shape, tokens=tokens, rows=rows, scores=rows, longest=longest, longest_keys=longest)
