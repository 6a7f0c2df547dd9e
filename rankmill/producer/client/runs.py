"""`ScoringRun`, the handle of a submitted run, and the scores, rankings and statistics that it returns."""

from __future__ import annotations

import math
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rankmill.jobs.contract.errors import ConfigError, InputError, StillWaiting
from rankmill.jobs.contract.results import worst
from rankmill.jobs.contract.run import Progress
from rankmill.jobs.contract.wire import outputs
from rankmill.jobs.system import system
from rankmill.producer.client.show import as_html, shown

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    from rankmill.producer.collect.driver import RunDriver
    from rankmill.producer.collect.scored import ScoredTable

    RowScore = TypeVar("RowScore", default=float)
    """The type of a row's score: a float, or with ``all_labels`` a list of floats."""
else:
    RowScore = typing.TypeVar("RowScore")


class Scores(np.ndarray[tuple[int, ...], np.dtype[np.float32]]):
    """The scores of a run as float32 ``[n]``, with NaN for the rows in `errors`.

    With ``all_labels`` the shape is ``[n, labels]``. Pickling keeps `errors` and `labels`; a slice, a copy or
    the result of a computation has them empty.
    """

    errors: Mapping[int, str]
    """The reason why a row has no score, by row number (from 0)."""
    labels: tuple[str, ...]
    """The label of each column of scores with the shape ``[n, labels]``; empty for the shape ``[n]``."""

    def __array_finalize__(self, _: object) -> None:
        self.errors, self.labels = {}, ()

    def __reduce__(self) -> tuple[Any, ...]:
        make, arguments, state = cast("tuple[Any, ...]", super().__reduce__())
        return make, arguments, (state, dict(self.errors), self.labels)

    def __setstate__(self, state: Any) -> None:
        array, self.errors, self.labels = state
        super().__setstate__(array)

    @classmethod
    def of(
        cls, parts: Sequence[npt.NDArray[np.float32]], errors: Mapping[int, str], labels: tuple[str, ...] = ()
    ) -> Scores:
        """Join the scores of a run's chunks, in order."""
        if labels:  # a chunk without any score does not know the labels
            parts = [part if part.ndim > 1 else np.stack([part] * len(labels), 1) for part in parts]
        whole = np.concatenate(parts) if parts else np.zeros(0, np.float32)
        scores = whole.view(cls)
        scores.errors, scores.labels = dict(errors), labels
        return scores


def as_array(scores: pa.Array) -> npt.NDArray[np.float32]:
    """Turn scores into float32 ``[n]``, and lists of scores into ``[n, labels]``; null becomes NaN."""
    count = outputs(scores)
    if not count:
        plain: npt.NDArray[np.float32] = scores.to_numpy(zero_copy_only=False).astype(np.float32)
        return plain
    array = np.full((len(scores), count), np.nan, np.float32)
    values = scores.drop_null().flatten().to_numpy(zero_copy_only=False)
    array[scores.is_valid().to_numpy(zero_copy_only=False)] = values.reshape(-1, count)
    return array


@dataclass(frozen=True)
class Ranked:
    """A passage that `Client.rank` has ranked, with its index in the given list and its score.

    If the passage has no score, ``error`` is the reason and ``score`` is NaN.
    """

    index: int
    score: float
    error: str | None = None


@dataclass(frozen=True)
class Classified:
    """The most likely label of a text, and the probability of each label, from `Client.classify`.

    ``probabilities`` has the names of the labels as keys. If the text has no scores, ``error`` is the reason
    and ``label`` is empty.
    """

    label: str
    probabilities: Mapping[str, float]
    error: str | None = None


def classified(scores: Scores) -> list[Classified]:
    """Make the `Classified` of each row from its scores; an output without a name is called ``LABEL_0``."""
    names = scores.labels or ("LABEL_0",)
    labelled = []
    for row, values in enumerate(np.asarray(scores).reshape(-1, len(names)).tolist()):
        if row in scores.errors:
            labelled.append(Classified("", {}, scores.errors[row]))
        else:
            labelled.append(Classified(names[int(np.argmax(values))], dict(zip(names, values, strict=True))))
    return labelled


def check_top_k(top_k: int | None) -> None:
    """Raise `ConfigError` if `top_k` is neither ``None`` nor a positive whole number."""
    is_number = isinstance(top_k, int | np.integer) and not isinstance(top_k, bool)
    if top_k is not None and not (is_number and top_k > 0):
        raise ConfigError(f"top_k is {top_k!r}; give a number of at least 1, or leave it out for all")


def ranked(scores: Scores, top_k: int | None) -> list[Ranked]:
    """Rank passages by their scores, best first. Passages without a score come last.

    Raises
    ------
    ConfigError
        The passages have several scores each.
    """
    if scores.ndim > 1:
        raise ConfigError("all_labels: passages are ranked by one score; name its label instead")
    order = np.argsort(-np.asarray(scores), kind="stable")[:top_k].tolist()
    return [Ranked(index, float(scores[index]), scores.errors.get(index)) for index in order]


@dataclass
class RunStats:
    """Statistics of the rows of a run that were read so far.

    ``retries`` counts attempts beyond a chunk's first. ``tokens`` counts real tokens, and ``padded_tokens``
    counts padding too. ``workers`` has, by the worker's name, the number of rows that it scored; rows that no
    worker scored count under the empty name. ``seconds`` is the time of the slowest chunk, from fetching it
    to having its scores. The time for loading the model does not count. ``tokenize_seconds`` and
    ``forward_seconds`` are parts of ``seconds``.

    ``precision``, ``backend``, ``device``, ``revision`` and ``kind`` say how the last scored chunk was
    scored; ``None`` means unknown. ``kind`` is only known for a deterministic run. If two runs of a model
    have the same kind, a pair gets the same score in both, bit for bit. ``bounds`` are the proven bounds (see
    `bound`) of all chunks.

    ``reference`` is ``own`` if the model was too large to compare the workers' logits with logits in fp32.
    The bounds then come from a comparison with the logits that transformers computes in the worker's
    precision. Otherwise, ``reference`` is ``None``.
    """

    rows: int = 0
    chunks: int = 0
    retries: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    workers: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    tokenize_seconds: float = 0.0
    forward_seconds: float = 0.0
    precision: str | None = None
    backend: str | None = None
    device: str | None = None
    revision: str | None = None
    kind: str | None = None
    bounds: set[float | None] = field(default_factory=set)
    reference: str | None = None

    @property
    def bound(self) -> float | None:
        """The proven bound on the difference between the workers' logits and the model's own. Workers prove
        the bound on probes, which are test pairs. In fp32 the bound leaves room for rows that differ more
        than the probes. In other precisions, a few rows may differ by more than the bound. If the bound is
        not proven for each chunk that was read, this is ``None``.
        """
        return worst(self.bounds)

    def contract(self) -> dict[str, str]:
        """Return facts about how the scores were made, such as the precision and the device. The facts are
        texts by name; unknown ones are left out.
        """
        facts = {
            "precision": self.precision,
            "backend": self.backend,
            "device": self.device,
            "revision": self.revision,
            "bound": None if self.bound is None else f"{self.bound:g}",
            "reference": self.reference,
            "deterministic": self.kind and "true",
            "kind": self.kind,
        }
        return {name: value for name, value in facts.items() if value}

    def add(self, part: ScoredTable) -> None:
        """Add a scored chunk of the run to these statistics."""
        rows = len(part.table)
        self.rows += rows
        self.chunks += 1
        self.retries += max(part.attempts - 1, 0)
        self.workers[part.worker] = self.workers.get(part.worker, 0) + rows
        if part.stats:
            self.tokens += part.stats.tokens
            self.padded_tokens += part.stats.padded_tokens
            if part.stats.seconds >= self.seconds:
                self.seconds = part.stats.seconds
                self.tokenize_seconds = part.stats.tokenize_seconds
                self.forward_seconds = part.stats.forward_seconds
            self.precision, self.backend = part.stats.precision, part.stats.backend
            self.device, self.revision = part.stats.device, part.stats.revision
            self.kind = part.stats.kind
            self.bounds.add(part.stats.bound)
            self.reference = part.stats.reference or self.reference


class Join(NamedTuple):
    """Functions that combine the tables of several runs, their progress, and their numbers of rows.

    ``places`` has the row numbers that each run scores. It is empty if every run scores all rows.
    """

    tables: Callable[[Sequence[Iterator[ScoredTable]]], Iterator[ScoredTable]]
    progress: Callable[[Sequence[Progress]], Progress]
    rows: Callable[[Sequence[int | None]], int | None]
    places: Sequence[npt.NDArray[np.int64]] = ()


_ALONE = Join(itemgetter(0), itemgetter(0), itemgetter(0))


class ScoringRun(Generic[RowScore]):
    """Handle of a submitted run. Read a run's results once, either all with `scores`, or in parts by
    iterating.

    At first, at most as many chunks are submitted as the setting ``window`` allows. Further chunks are
    submitted while the caller reads results. Only one thread at a time may read a run; any thread may use
    `cancel` and `progress`.

    A detached run is entirely in Redis. Any process that knows the id of a detached run may read the run,
    until ``run_ttl`` seconds after its submission. The tables of a detached run have no columns.
    """

    def __init__(self, *drivers: RunDriver, join: Join = _ALONE) -> None:
        self._drivers, self._join = drivers, join
        self._scores: list[npt.NDArray[np.float32]] = []
        self._all: Scores | None = None
        self.errors: dict[int, str] = {}
        """The reason why a row has no score, by row number (from 0), for the rows read so far."""
        self.stats = RunStats()
        """Statistics of the rows that were read so far, such as their tokens and workers."""
        self.labels: tuple[str, ...] = ()
        """With ``all_labels``, the labels of a row's scores, in the order of the scores. Empty until a scored
        chunk was read.
        """
        self.found: list[str | None] = []
        """The tokens of each row read so far, as the JSON of a `TokensFound`. The list is empty unless the
        run asks workers for tokens instead of scores.
        """

    @property
    def id(self) -> str:
        """The run's id, as in logs and Redis keys. Other processes attach to a detached run by this id.

        If the model is an alias for several versions, there is an id for each version that scores rows. The
        ids are separated by commas.
        """
        return ",".join(driver.run.id for driver in self._drivers)

    @property
    def model(self) -> str:
        """Name of the model that scores the run.

        If the run was given an alias, this is the version for which the alias stood when the run began. If
        several versions score rows, their names are separated by commas.
        """
        return ",".join(driver.run.spec.model for driver in self._drivers)

    @property
    def versions(self) -> list[tuple[str, str | None, npt.NDArray[np.int64] | slice]]:
        """Name, revision and row numbers of each model that scores the run. There are several models if the
        run's model is an alias for several versions.
        """
        if not self._join.places:
            return [(self.model, self.stats.revision, slice(None))]
        specs = [driver.run.spec for driver in self._drivers]
        return [
            (spec.model, spec.revision, rows) for spec, rows in zip(specs, self._join.places, strict=True)
        ]

    @property
    def is_detached(self) -> bool:
        """Whether the run is detached: it goes on even if this process ends."""
        return any(driver.is_detached for driver in self._drivers)

    @property
    def rows(self) -> int | None:
        """The number of the run's rows; ``None`` if it is not known, for example if the rows come from an
        iterator.
        """
        return self._join.rows([driver.run.rows for driver in self._drivers])

    @property
    def progress(self) -> Progress:
        """The number of the run's rows that are done, and the speed; a row is done when its chunk is
        finished.
        """
        for driver in self._drivers:
            driver.refresh()
        return self._seen

    @property
    def scoring_since(self) -> float:
        """When the first worker began to score the run (`time.monotonic` seconds); infinite until a result
        has come.
        """
        return min(driver.scoring_since for driver in self._drivers)

    def _repr_html_(self) -> str:
        return f"run {self.id}, {self.model}: {as_html(self.progress, self.rows)}"

    def wait(self, timeout: float | None = None, *, show_progress: bool | None = None) -> RunStats:
        """Wait for the end of the run, and return `stats`. After that, `scores` returns the scores without
        waiting. Parameters and errors are those of `scores`.
        """
        if self._was_iterated and self._is_read:
            for _ in self.tables():
                pass  # no table is left, but the run ends only when a reader asks for one more
        else:
            self.scores(timeout, show_progress=show_progress)
        return self.stats

    def scores(self, timeout: float | None = None, *, show_progress: bool | None = None) -> Scores:
        """Wait for all scores. They are float32 ``[n]`` or ``[n, labels]``, with NaN for the rows in
        `errors`.

        Parameters
        ----------
        timeout
            Longest time to wait, in seconds.
        show_progress
            Whether to show a progress bar; by default only in Jupyter, if the wait takes more than half a
            second.

        Raises
        ------
        RunTimeout, NoWorkers
            Some scores are still missing. The run goes on; call this again to continue waiting, or `cancel`.
        RunFailed, RunCancelled
            The run has ended without all of its scores.
        RunExpired
            The results of a detached run are no longer kept.
        EmbeddedError
            The server or the workers of an embedded client cannot be kept alive.
        InputError
            An item of a stream is not a row of the run's kind, or some rows were already read by iterating
            the run.
        RedisUnavailable, RedisFailed
            The server could not serve for as long as a command may wait, or it refuses a command.
        """
        is_cancelled = any(driver.is_cancelled for driver in self._drivers)
        if self._was_iterated and (self._is_read or not is_cancelled):
            raise self._read_before()
        return read_together([self], timeout, show_progress)[0] if self._all is None else self._all

    def __iter__(self) -> Iterator[RowScore]:
        """Yield the scores in input order, each as soon as it is available.

        A score is a float, or with ``all_labels`` a list of floats. For a row in `errors`, the score is NaN.
        Scores that a call of `scores` has read come first. Raises `InputError` if the run was iterated
        before; after `RunTimeout` or `NoWorkers`, another iteration goes on with the next row.
        """
        if self._was_iterated and self._is_read:
            raise self._read_before()
        read = self._scores if self._all is None else [self._all]
        for row, score in enumerate(chain.from_iterable(part.tolist() for part in read)):
            yield cast("RowScore", math.nan if row in self.errors else score)
        self._scores = []
        for part in self.tables() if self._all is None else ():
            for score in part.scores.to_pylist():
                yield cast("RowScore", math.nan if score is None else score)

    def tables(self) -> Iterator[ScoredTable]:
        """Yield the input as tables in input order, each with its scores, errors and statistics."""
        for part in self._join.tables([driver.tables() for driver in self._drivers]):
            if part.errors.null_count < len(part.table):
                reasons = enumerate(part.errors.to_pylist(), self.stats.rows)
                self.errors |= {row: reason for row, reason in reasons if reason is not None}
            for piece in part.parts or (part,):
                self.stats.add(piece)
                if piece.stats:
                    self.labels = piece.stats.labels
            if part.tokens is not None and pa.types.is_string(part.tokens.type):
                self.found += part.tokens.to_pylist()
            yield part

    def cancel(self) -> None:
        """Cancel the run: its waiting chunks leave the queue, and its keys are deleted."""
        for driver in self._drivers:
            driver.cancel()

    def _read_before(self) -> InputError:
        again = "attach to it" if self.is_detached else "submit the rows"
        return InputError(f"some rows of this run were read by iterating it: {again} again")

    @property
    def _was_iterated(self) -> bool:
        return self._all is None and self.stats.rows != sum(map(len, self._scores))

    @property
    def _is_read(self) -> bool:
        """Whether the caller has read all rows of the run."""
        return all(driver.collector.done for driver in self._drivers)

    @property
    def _seen(self) -> Progress:
        """The run's progress as far as this process knows it, without asking the server."""
        return self._join.progress([driver.progress for driver in self._drivers])


def joined(runs: Sequence[ScoringRun[Any]], join: Join) -> ScoringRun[Any]:
    """Make one handle of several runs. `join` combines their tables, progress and numbers of rows."""
    return ScoringRun(*(driver for run in runs for driver in run._drivers), join=join)


@contextmanager
def cancelled_on_error(runs: Sequence[ScoringRun[Any]]) -> Iterator[None]:
    """Cancel all of `runs` if the ``with`` block raises an error.

    If the error is that a wait has ended too early (`StillWaiting`), the raised error also says that the runs
    are cancelled.
    """
    try:
        yield
    except BaseException as error:
        for run in runs:
            run.cancel()
        if isinstance(error, StillWaiting):
            raise error.of_a_cancelled_run() from None
        raise


def read_together(
    runs: Sequence[ScoringRun[Any]], timeout: float | None, show_progress: bool | None = False
) -> list[Scores]:
    """Wait for the scores of several runs over the same tables. Returns the scores of each run.

    The parameters and errors are those of `ScoringRun.scores`.
    """
    deadline = math.inf if timeout is None else system.monotonic() + timeout
    drivers = [driver for run in runs for driver in run._drivers]
    first = runs[0]  # the progress bar shows only the first run, because all runs have the same rows
    try:
        with shown(lambda: first._seen, first.rows, show_progress) as look:
            for driver in drivers:
                driver.deadline = deadline
            for driver in first._drivers:
                driver.on_show = look
            for parts in zip(*(run.tables() for run in runs), strict=True):
                for run, part in zip(runs, parts, strict=True):
                    run._scores.append(as_array(part.scores))
                look()
    finally:
        for driver in drivers:
            driver.deadline, driver.on_show = math.inf, lambda: None
    for run in runs:
        run._all = Scores.of(run._scores, run.errors, run.labels)
        run._scores = []
    return [run._all for run in runs if run._all is not None]
