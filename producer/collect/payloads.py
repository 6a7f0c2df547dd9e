"""Units as Redis holds them: encoded and compressed, several at once in threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from rankmill.jobs.contract.job import Payload
from rankmill.jobs.contract.wire import encode_pairs
from rankmill.jobs.runtime.limits import cores
from rankmill.producer.collect.splitting import Unit

_ENCODERS = 8
"""Most threads that encode and compress chunks; Arrow releases Python's lock meanwhile."""


class Encoder:
    """Encodes the units of a run.

    Parameters
    ----------
    columns
        Names of the query and passage columns in their tables.
    trace
        Returns the trace to which a unit's job belongs.
    times
        As of `Payload`.
    """

    def __init__(
        self, columns: tuple[str, str], trace: Callable[[Unit], Mapping[str, str]], *, times: bool
    ) -> None:
        self._columns = columns
        self._trace = trace
        self._times = times
        self._threads: ThreadPoolExecutor | None = None

    def encode(self, units: Mapping[int, Unit]) -> dict[int, Payload]:
        """Return the payload of each unit, and set its ``payload_bytes``."""
        if len(units) == 1:
            return {number: self._payload(unit) for number, unit in units.items()}
        if self._threads is None:
            self._threads = ThreadPoolExecutor(min(cores(), _ENCODERS), "rankmill-encode")
        return dict(zip(units, self._threads.map(self._payload, units.values()), strict=True))

    def _payload(self, unit: Unit) -> Payload:
        queries, passages = (unit.table[name] for name in self._columns)
        pairs = encode_pairs(queries, passages)
        unit.payload_bytes = len(pairs)
        return Payload(pairs, len(unit.table), self._trace(unit), suspect=unit.piece, times=self._times)
