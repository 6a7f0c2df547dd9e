"""What extensions add to what is shown of a cluster, by the seam ``rankmill.watch``.

An extension subclasses `Watch`, and `Seen` for what it reads of the cluster; what it adds nothing to stays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, cast
from wsgiref.types import WSGIApplication

import redis
from pydantic import BaseModel, ConfigDict

from rankmill.cluster.look import Look
from rankmill.jobs.contract.errors import ConfigError
from rankmill.jobs.contract.run import Progress
from rankmill.jobs.runtime.settings import Settings
from rankmill.plugins import load, names

if TYPE_CHECKING:
    from rich.console import RenderableType

logger = logging.getLogger(__name__)


class ClusterFault(BaseModel):
    """Something that is wrong, as a sentence without its full stop, and what to do."""

    model_config = ConfigDict(frozen=True)

    kind: str
    text: str
    remedy: str


class Gauge(NamedTuple):
    """A metric of the exporter: name, help, names of its labels, and a value for each of their values."""

    name: str
    text: str
    labels: tuple[str, ...]
    samples: Mapping[tuple[str, ...], float]


class Seen(BaseModel):
    """What an extension has read of a cluster; its fields are in the JSON of ``rankmill status``."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    def queues(self) -> Iterable[str]:
        """Queues of RQ that processes of the extension take, and no workers."""
        return ()

    def faults(self) -> Iterator[ClusterFault]:
        """What is wrong; each kind is one of `Watch.kinds`."""
        return iter(())

    def lines(self) -> Iterator[str]:
        """Sentences for ``rankmill status``, below the runs."""
        return iter(())

    def gauges(self) -> list[Gauge]:
        """Metrics; the same ones whatever was read."""
        return []


class RunStatus(NamedTuple):
    """The state of a run: for people, for ``--json``, and how many rows have no score."""

    text: str
    data: BaseModel
    row_errors: int = 0


class WatchedRun(Protocol):
    """A run that processes of an extension carry out, for ``rankmill status``, ``wait`` and ``cancel``."""

    def status(self) -> RunStatus:
        """Its state."""

    def wait(self, timeout: float | None, show: Callable[[int, Progress], None]) -> RunStatus:
        """Wait for its end; `show` gets the number of rows and the progress, several times a second."""

    def cancel(self) -> str:
        """Cancel it; returns a sentence that says so."""


class ListedRuns(NamedTuple):
    """Runs for ``rankmill runs``: their name in its JSON, what stands there, and a table for people."""

    name: str
    data: Sequence[BaseModel]
    table: RenderableType


class Watch:
    """What an extension adds."""

    kinds: ClassVar[Mapping[str, str]] = {}
    """Kinds of its faults, each with the kind of the fault that is just worse."""

    nothing: ClassVar[Seen] = Seen()
    """What it has seen before it has looked."""

    def read(self, look: Look) -> Seen:
        """Read what it shows of the cluster, in a few round trips whatever the size."""
        return self.nothing

    def find(self, client: redis.Redis, settings: Settings, run_id: str) -> WatchedRun | None:
        """The run with an id, or whose id alone begins so; raises `InputError` if several do."""
        return None

    def runs(self, client: redis.Redis, settings: Settings) -> ListedRuns | None:
        """Its latest runs; ``None`` if it has no kind of runs."""
        return None

    def pages(self, client: redis.Redis) -> Mapping[str, WSGIApplication]:
        """What the exporter serves beside ``/metrics``, by path; `client` does not wait for the server."""
        return {}


def watches() -> dict[str, Watch]:
    """What the installed extensions add, by their names; without those that cannot be imported."""
    found: dict[str, Watch] = {}
    for name in names("rankmill.watch"):
        try:
            found[name] = cast("Watch", load("rankmill.watch", name))
        except ConfigError as error:
            logger.debug("not shown: %s", error)
    return found


def find_watched(client: redis.Redis, settings: Settings, run_id: str) -> WatchedRun | None:
    """A run that an extension's processes carry out, by its id or the beginning of it."""
    runs = (watch.find(client, settings, run_id) for watch in watches().values())
    return next((run for run in runs if run), None)


def counted(number: int, what: str) -> str:
    """A number of things.

    >>> counted(1, "run"), counted(2000, "run")
    ('1 run', '2,000 runs')
    """
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def waiting(number: int, what: str) -> str:
    """So many things wait."""
    return f"{counted(number, what)} {'waits' if number == 1 else 'wait'}"
