"""Lets extensions add faults, metrics and runs to the views of a cluster. Their entry points are in the group
``rankmill.watch``.

An extension has a subclass of `Watch`, and a subclass of `Seen` for what the extension reads of the cluster.
A method that is not overridden adds nothing.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, TypeVar
from wsgiref.types import WSGIApplication

import redis
from pydantic import BaseModel, ConfigDict

from rankmill.cluster.look import Look
from rankmill.jobs.contract.errors import ConfigError, RankmillError, RedisUnavailable
from rankmill.jobs.contract.run import Progress
from rankmill.jobs.contract.shown import counted
from rankmill.jobs.runtime.settings import Settings
from rankmill.plugins import load_each

if TYPE_CHECKING:
    from rich.console import RenderableType

T = TypeVar("T")

_METRIC = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")

logger = logging.getLogger(__name__)


class ClusterFault(BaseModel):
    """Something that is wrong in a cluster.

    Attributes
    ----------
    kind
        The kind of fault.
    text
        A sentence without a full stop.
    remedy
        What to do about it.
    """

    model_config = ConfigDict(frozen=True)

    kind: str
    text: str
    remedy: str


class Gauge(NamedTuple):
    """A metric of the exporter. ``samples`` has a number for each combination of the labels' values."""

    name: str
    text: str
    labels: tuple[str, ...]
    samples: Mapping[tuple[str, ...], float]


class RunFigures(BaseModel):
    """The progress of a run. A field is ``None`` if its value is unknown; ``rows`` is the number of all
    rows.
    """

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    id: str
    queue: str
    model: str
    created: float
    rows: int | None
    rows_done: int
    row_errors: int
    rows_per_second: float | None
    seconds_left: float | None


class SeenRun(RunFigures):
    """A run that processes of an extension carry out.

    Attributes
    ----------
    runner
        The process that works on the run.
    reason
        Why the run has failed, or why it was put back and waits again; empty for all other runs.
    """

    state: str
    output: str
    runner: str
    reason: str


class Seen(BaseModel):
    """Base class of what an extension has read of a cluster. The fields of a subclass are in the JSON of
    ``rankmill status``.
    """

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    def queues(self) -> Iterable[str]:
        """Return the queues of RQ whose jobs are for processes of the extension, not for workers."""
        return ()

    def runs(self) -> Iterable[SeenRun]:
        """Return the extension's runs for the live page, in the order in which the page shows them."""
        return ()

    def faults(self) -> Iterator[ClusterFault]:
        """Return what is wrong with the extension's part of the cluster. `Watch.kinds` has each fault's
        kind.
        """
        return iter(())

    def lines(self) -> Iterator[str]:
        """Return sentences that ``rankmill status`` prints below the workers."""
        return iter(())

    def gauges(self) -> list[Gauge]:
        """Return metrics for the exporter. Their names and labels must always be the same."""
        return []


class RunStatus(NamedTuple):
    """The state of a run.

    Attributes
    ----------
    text, data
        The state in words for people, and as JSON for ``--json``.
    row_errors
        Number of rows without a score.
    """

    text: str
    data: BaseModel
    row_errors: int = 0


class WatchedRun(Protocol):
    """A run that an extension's processes carry out. ``rankmill status``, ``wait`` and ``cancel`` use it."""

    def status(self) -> RunStatus:
        """Return the state of the run."""

    def wait(self, timeout: float | None, show: Callable[[int, Progress], None]) -> RunStatus:
        """Wait for the end of the run. Several times a second, call `show` with the number of rows and the
        progress.
        """

    def cancel(self) -> str:
        """Cancel the run, and return a sentence that says so."""


class ListedRuns(NamedTuple):
    """An extension's runs for ``rankmill runs``: JSON under the key ``name``, and a table for people."""

    name: str
    data: Sequence[BaseModel]
    table: RenderableType


class Watch:
    """Base class for what an extension adds to the views of a cluster, such as faults, metrics and runs."""

    kinds: ClassVar[Mapping[str, str]] = {}
    """The kinds of the extension's faults, each with another kind that is a little worse.

    These pairs order the list of all kinds, the worst first. With ``{"no_runners": "no_workers"}``, the
    extension's kind ``no_runners`` comes just after ``no_workers``. It comes last if no kind ``no_workers``
    exists.
    """

    nothing: ClassVar[Seen] = Seen()
    """What `read` returns if the extension reads nothing of the cluster."""

    def read(self, look: Look) -> Seen:
        """Read from Redis, by means of `look`, what the extension shows of the cluster. Use few round trips,
        even if the cluster is large.
        """
        return self.nothing

    def find(self, client: redis.Redis, settings: Settings, run_id: str) -> WatchedRun | None:
        """Find the extension's run whose id is or begins with `run_id`. Return ``None`` if the extension has
        no run with this id.

        Raises `InputError` if several ids begin with `run_id`.
        """
        return None

    def runs(self, client: redis.Redis, settings: Settings) -> ListedRuns | None:
        """Return the latest runs of the extension, or ``None`` if the extension does not have runs."""
        return None

    def pages(self, client: redis.Redis, settings: Settings) -> Mapping[str, WSGIApplication]:
        """Return, by path, the WSGI applications that the exporter serves for the extension.

        `client` does not wait for a server that is away.
        """
        return {}


class Broken(Seen):
    """Takes the place of the `Seen` of an extension that fails, and shows a fault with the reason."""

    name: str
    reason: str

    def faults(self) -> Iterator[ClusterFault]:
        yield ClusterFault(
            kind="extension",
            text=f"Extension {self.name} cannot show the cluster: {self.reason}",
            remedy="repair or uninstall its package; all else is shown",
        )


def watches() -> dict[str, Watch]:
    """Return each installed extension's `Watch`, by the extension's name.

    For an extension that cannot be imported, the `Watch` shows a fault.
    """
    loaded: dict[str, Watch] = {}
    for name, _, watch in load_each("rankmill.watch"):
        if isinstance(watch, Watch):
            loaded[name] = watch
        else:
            wrong = watch if isinstance(watch, ConfigError) else f"{watch!r:.60} is not an object of a Watch"
            loaded[name] = _BrokenWatch(name, str(wrong))
    return loaded


class _BrokenWatch(Watch):
    def __init__(self, name: str, reason: str) -> None:
        self.nothing = Broken(name=name, reason=reason)  # type: ignore[misc]


def read_extensions(look: Look) -> dict[str, Seen]:
    """Return what each extension has read of the cluster, by the extension's name.

    For an extension that fails, this is a `Broken`.

    Raises
    ------
    redis.RedisError, RedisUnavailable, OSError
        The server cannot serve.
    """
    return {name: _seen(name, watch, look) for name, watch in watches().items()}


def _seen(name: str, watch: Watch, look: Look) -> Seen:
    try:
        seen = watch.read(look)
        # Call all methods once, although their results are used only later: if one fails, only this extension
        # is shown as broken.
        kinds = {fault.kind for fault in seen.faults()} - {"extension", *watch.kinds}
        if kinds:
            raise ValueError(f"{', '.join(sorted(kinds))} is not among the kinds of its faults")
        _ = [*seen.queues(), *seen.runs(), *seen.lines(), *checked_gauges(seen), seen.model_dump_json()]
    except (redis.RedisError, RedisUnavailable, OSError):
        raise
    except Exception as error:
        return Broken(name=name, reason=_reason(error))
    return seen


def checked_gauges(seen: Seen) -> list[Gauge]:
    """Return an extension's metrics for the exporter. Raises `ValueError` if Prometheus would refuse one."""
    gauges = seen.gauges()
    for name, _, labels, samples in gauges:
        if not (_METRIC.fullmatch(name) and all(map(_LABEL.fullmatch, labels))):
            raise ValueError(f"gauge {name!r:.60} or one of its labels has a name that Prometheus refuses")
        if any(len(values) != len(labels) for values in samples):
            raise ValueError(f"gauge {name} has samples without a value for each label")
        _ = [float(value) for value in samples.values()]
    return gauges


def ask_extensions(question: Callable[[Watch], T]) -> Iterator[T]:
    """Call the function `question` with the `Watch` of each extension, and yield what it returns.

    An extension that fails is left out, with a warning that names it. Errors of rankmill, the server and the
    operating system are raised.
    """
    for name, watch in watches().items():
        try:
            answer = question(watch)
        except (RankmillError, redis.RedisError, OSError):
            raise
        except Exception as error:
            logger.warning("extension %s fails and is left out: %s", name, _reason(error))
        else:
            yield answer


def _reason(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def find_watched(client: redis.Redis, settings: Settings, run_id: str) -> WatchedRun | None:
    """Ask the extensions for a run whose id is or begins with `run_id`. Return the first run found, or
    ``None`` if no extension has such a run.
    """
    runs = ask_extensions(lambda watch: watch.find(client, settings, run_id))
    return next((run for run in runs if run), None)


def waiting(number: int, noun: str) -> str:
    """Write how many things wait, with the verb in the singular or the plural.

    >>> waiting(1, "run"), waiting(2, "run")
    ('1 run waits', '2 runs wait')
    """
    return f"{counted(number, noun)} {'waits' if number == 1 else 'wait'}"
