"""The journal, a small SQLite database in the run's folder, which keeps the run's results on disk.

A chunk's result is written and synced before the producer deletes the result from Redis. So if this process
or its machine dies, only the chunks in flight must be scored again. The journal holds scores, errors and
statistics, but not the input's columns, which can be read again.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from pydantic import Field
from pydantic_core import from_json

from rankmill.jobs.contract.errors import InputError, OutputError, WireError, WrongScores
from rankmill.jobs.contract.results import (
    Amounts,
    ChunkFailure,
    ChunkResult,
    ChunkScores,
    ChunkStats,
    from_entry,
    to_entry,
)
from rankmill.jobs.contract.schema import FORMAT, MAX_CHUNK_ROWS, Count, WireModel

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=WireModel)

_TABLES = f"""
PRAGMA journal_mode = WAL;
PRAGMA synchronous = FULL;
BEGIN;
PRAGMA user_version = {FORMAT};
CREATE TABLE IF NOT EXISTS manifest (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS state (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS chunks
    (chunk INTEGER PRIMARY KEY, rows INTEGER NOT NULL, scores BLOB, about TEXT NOT NULL);
COMMIT;
"""
"""SQL that creates the journal's tables and writes its format. Tables and format are written in one
transaction, so that SQLite syncs the file only once.
"""

_NEXT_CUT = """
SELECT chunk, rows FROM chunks
WHERE chunk >= ? AND typeof(rows) = 'integer' AND rows BETWEEN 1 AND ? ORDER BY chunk LIMIT 1
"""

_GET = "SELECT scores, CAST(about AS BLOB) FROM chunks WHERE chunk = ?"


class Account(WireModel):
    """The usage of all runs for one output: rows, tokens and device time.

    The journal stores this, so that each result is added only once to the account of the run's tenant.

    Attributes
    ----------
    scored
        Number of rows that devices have scored.
    used
        The usage of the last run's latest results, by the id of each result's entry in the run's stream. If
        an entry is still in Redis, its usage must still be added to the tenant's account.
    rest
        The rows that no device has scored, for example because they have no score; ``None`` until a run is
        complete.
    """

    scored: Count = 0
    used: dict[str, dict[str, Amounts]] = Field(default_factory=dict)
    rest: Amounts | None = None


class Finished(WireModel):
    """Part files of an output that are already at their final paths.

    The journal no longer has the results of the rows in these files.

    Attributes
    ----------
    parts
        Number of the files.
    rows, row_errors
        Number of rows in these files, and number of rows without a score in them.
    first
        Statistics of the run's first scored chunk.
    tally
        The caller's sums over the rows of all these files, as text.
    """

    parts: Count
    rows: Count
    row_errors: Count
    first: ChunkStats | None
    tally: str


_NONE = Finished(parts=0, rows=0, row_errors=0, first=None, tally="")


class Journal:
    """A database file with the results for one output, by chunk number. It also has the manifest, which
    describes the inputs and options from which the output is made.

    Parameters
    ----------
    path
        The database file; created if it does not exist.
    check
        Called after each write of results. Raises an error if the file is no longer in its place.
    place
        The path at which SQLite opens the file; by default `path`.

    Raises
    ------
    InputError
        The file is damaged; any method raises this. Or the file has another format; the constructor raises
        this.
    OutputError
        The file cannot be written or read, for instance on a full disk; any method raises this.
    """

    def __init__(
        self, path: Path, check: Callable[[], None] = lambda: None, place: Path | None = None
    ) -> None:
        self._path = path
        self.folder = (place or path).parent
        self._check = check
        with self._told():
            self._db = sqlite3.connect(place or path)
            # In this mode SQLite keeps the index of its log in memory. In its usual mode, SQLite writes the
            # index to another file before it reads the results of an earlier run, and a full disk has no room
            # for that file.
            self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
        try:
            self._check_format()
            with self._at_work():
                self._db.executescript(_TABLES)
            self.finished = self._read_state("finished", Finished) or _NONE
            self.is_in_redis = self.run is not None
            """Whether the last run for this output may still be in Redis. Set this to ``False`` after
            deleting the run there.
            """
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the database. This also works on a full disk: all results are already synced."""
        self._db.close()

    @property
    def rows(self) -> int:
        """Number of the output's rows that have a result, in finished part files or in this journal."""
        count = """
            SELECT coalesce(sum(rows), 0) FROM chunks WHERE typeof(rows) = 'integer' AND rows BETWEEN 0 AND ?
        """
        with self._at_work():
            ((rows,),) = self._db.execute(count, (MAX_CHUNK_ROWS,))
        return self.finished.rows + int(rows)

    @property
    def manifest(self) -> dict[str, str]:
        with self._at_work():
            return dict(self._db.execute("SELECT name, value FROM manifest ORDER BY rowid").fetchall())

    @property
    def run(self) -> str | None:
        return self._state("run")

    @property
    def runs(self) -> list[str]:
        """Ids of all runs whose results this journal has."""
        return (self._state("runs") or "").split()

    @property
    def first(self) -> ChunkStats | None:
        """Statistics of the first scored chunk, or ``None``. All other chunks must be scored in the same way,
        for example in the same precision.
        """
        if self.finished.first:
            return self.finished.first
        with self._at_work():
            rows = self._db.execute("SELECT chunk FROM chunks WHERE scores IS NOT NULL ORDER BY chunk")
            chunks = [int(chunk) for (chunk,) in rows]
        results = (self.get(chunk) for chunk in chunks)
        return next((result.stats for result in results if isinstance(result, ChunkScores)), None)

    def restart(self, manifest: Mapping[str, str]) -> None:
        """Delete all results and store a new `manifest`; the last run's id is kept."""
        self.finished = _NONE
        with self._at_work():
            self._db.execute("DELETE FROM state WHERE name IN ('finished', 'account', 'runs', 'wrong')")
            self._db.execute("DELETE FROM chunks")
            self._db.execute("DELETE FROM manifest")
            self._db.executemany("INSERT INTO manifest VALUES (?, ?)", manifest.items())

    def begin(self, run: str) -> None:
        """Store a run's id, before any of its chunks is in the queue."""
        with self._at_work():
            self._write_state("runs", " ".join([*self.runs, run]))
            self._write_state("run", run)
            self._write_state("account", self.account.model_copy(update={"used": {}}).written())
        self.is_in_redis = True

    @property
    def account(self) -> Account:
        return self._read_state("account", Account) or Account()

    def keep_account(self, account: Account) -> None:
        self._set_state("account", account.written())

    @property
    def model(self) -> str | None:
        """Name of the model that scores this output; ``None`` if no name was stored. In place of an alias,
        this is the version for which the alias stood when the output was begun.
        """
        return self._state("model")

    def keep_model(self, model: str) -> None:
        self._set_state("model", model)

    def get(self, chunk: int, rows: int | None = None) -> ChunkResult | None:
        """Read the result of a chunk; ``None`` if the journal does not have it, or has a damaged one.

        `rows` is the chunk's number of rows, if it is known. A damaged result is deleted, so that the chunk
        is scored again.
        """
        with self._at_work():
            row = self._db.execute(_GET, (chunk,)).fetchone()
        if row is None:
            return None
        try:
            return self._result(chunk, rows, *row)
        except WireError as error:
            logger.warning("chunk %d is scored again, it is damaged in %s: %s", chunk, self._path, error)
            with self._at_work():
                self._db.execute("DELETE FROM chunks WHERE chunk = ?", (chunk,))
            return None

    def next_cut(self, start: int) -> tuple[int, int] | None:
        """Find the next chunk with a result, at row `start` or later.

        Returns the chunk's first row and number of rows, or ``None`` if no such chunk follows.
        """
        with self._at_work():
            row = self._db.execute(_NEXT_CUT, (start, MAX_CHUNK_ROWS)).fetchone()
        return row and (int(row[0]), int(row[1]))

    def add(self, results: Mapping[int, tuple[int, ChunkResult]], account: Account) -> None:
        """Store the `results` of chunks, given as ``{chunk: (rows, result)}``, and what the runs for this
        output have used so far (`account`). Both are synced to disk when this returns.

        Fatal failures are not stored, and neither are results of rows in finished parts.
        """
        results = {chunk: result for chunk, result in results.items() if chunk >= self.finished.rows}
        with self._at_work():
            self._db.executemany("INSERT OR IGNORE INTO chunks VALUES (?, ?, ?, ?)", self._records(results))
            self._write_state("account", account.written())
        self._check()

    def distrust(self, why: str) -> WrongScores:
        """Mark the results as wrong, so that no command continues with them; returns the error to raise."""
        self._set_state("wrong", why)
        return _wrong(why)

    @property
    def wrong(self) -> WrongScores | None:
        why = self._state("wrong")
        return None if why is None else _wrong(why)

    def finish(self, finished: Finished) -> None:
        """Record that part files of the output are at their final paths. Delete the results of the rows in
        those files.
        """
        with self._at_work():
            self._write_state("finished", finished.written())
            self._db.execute("DELETE FROM chunks WHERE chunk < ?", (finished.rows,))
        self.finished = finished

    def _records(
        self, results: Mapping[int, tuple[int, ChunkResult]]
    ) -> Iterator[tuple[int, int, bytes | None, str]]:
        run = self.run or ""
        for chunk, (rows, result) in results.items():
            if isinstance(result, ChunkFailure) and result.fatal:
                continue
            entry = to_entry(run, result)
            scores = entry.pop("scores", None)
            assert scores is None or isinstance(scores, bytes)
            yield chunk, rows, scores, json.dumps(entry)

    def _result(self, chunk: int, rows: int | None, scores: object, written: bytes) -> ChunkResult:
        try:
            fields = from_json(written)
            entry = {name.encode(): str(value).encode() for name, value in fields.items()}
        except (AttributeError, ValueError) as error:
            raise WireError(str(error)) from None
        if scores is not None:
            if not isinstance(scores, bytes):
                raise WireError("the scores are text")
            entry[b"scores"] = scores
        run = str(fields.get("run"))
        if run not in self.runs:
            raise WireError(f"it is a result of run {run:.40}, which did not score this output")
        result = from_entry(run, entry)
        if result.chunk != chunk or (isinstance(result, ChunkFailure) and result.fatal):
            raise WireError("it is not the result of this chunk")
        if isinstance(result, ChunkScores) and rows not in {None, len(result.scores)}:
            raise WireError(f"it has {len(result.scores)} scores for {rows} rows")
        return result

    def _check_format(self) -> None:
        with self._told():
            ((written_as,),) = self._db.execute("PRAGMA user_version")
            ((tables,),) = self._db.execute("SELECT count(*) FROM sqlite_master")
        if tables and written_as != FORMAT:
            raise InputError(
                f"{self._path} has format {written_as}, this release reads {FORMAT}: continue with the "
                "release that began it, or start over with --restart"
            )

    def _read_state(self, name: str, kind: type[T]) -> T | None:
        record = self._state(name)
        try:
            return None if record is None else kind.read_json(record, f"{self._path} ({name})")
        except WireError as error:
            raise InputError(f"{error}; start over with --restart") from None

    def seal(self, output: str) -> None:
        """Record the `identity` of the complete output file, just before it is moved to its final path."""
        self._set_state("output", "\n".join([*self.sealed, output]))

    @property
    def sealed(self) -> list[str]:
        """Identities of complete output files that `seal` has recorded.

        If the file at the output's path has one of these identities, it is the complete output. A producer
        has moved it there, but was killed before it could end the run.
        """
        return (self._state("output") or "").splitlines()

    def _state(self, name: str) -> str | None:
        with self._told():
            row = self._db.execute("SELECT value FROM state WHERE name = ?", (name,)).fetchone()
        value = row and row[0]
        return None if value is None else str(value)

    def _set_state(self, name: str, value: str) -> None:
        with self._at_work():
            self._write_state(name, value)

    def _write_state(self, name: str, value: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO state VALUES (?, ?)", (name, value))

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Run a transaction; SQLite's errors become `OutputError` or `InputError`."""
        with self._told(), self._db:
            yield

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            raise OutputError(f"cannot write {self._path}: {error}") from None
        except sqlite3.DatabaseError as error:
            raise InputError(f"{self._path} is damaged ({error}); start over with --restart") from None


def _wrong(why: str) -> WrongScores:
    return WrongScores(f"scores of this output are wrong: {why}; start over with --restart")
