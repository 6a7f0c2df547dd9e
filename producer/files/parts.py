"""The output in parts: files that appear whole, one after the other, each durable when it is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from rankmill.jobs.contract.errors import InputChanged, InputError
from rankmill.producer.collect.journal import Finished, Journal
from rankmill.producer.collect.scored import ScoredTable
from rankmill.producer.files.layout import Layout
from rankmill.producer.files.outputs import default_ending
from rankmill.producer.files.part_names import PART, PARTS, Part, is_of_parts, part_name, part_of
from rankmill.producer.files.sink import ScoredFile
from rankmill.producer.files.stores.paths import WORKSPACE, ObjectPath
from rankmill.producer.files.stores.writing import sync
from rankmill.producer.files.workspace import Workspace


class PartsFolder:
    """The folder of an output in parts, as `Workspace` sees it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def lock(self) -> Path:
        """See `Output.lock`."""
        return self.path / f"_parts{WORKSPACE}"

    def taken(self, journal: Journal) -> Path | None:
        """A part that is there and is not of the journal's run; ``None`` if there is none.

        The part after those that the journal knows may be there: its process died before it noted that.
        """
        known = journal.finished.parts + 1 if journal.rows else 0
        parts = {path: part for path in self.there() if (part := part_of(path.name))}
        return next((path for path in sorted(parts) if parts[path].number > known), None)

    def check(self, journal: Journal) -> None:
        """Check that all parts that the journal knows are there; raises `InputError` if not."""
        there = {part.number for path in self.there() if (part := part_of(path.name))}
        for number in range(1, journal.finished.parts + 1):
            if number not in there:
                raise InputError(
                    f"{self.path}: part {number} is gone, and its scores are kept nowhere else; "
                    "put it back, or start over with --restart"
                )

    def clear(self) -> None:
        """Delete all parts."""
        for path in self.there():
            path.unlink()
        if not isinstance(self.path, ObjectPath) and self.path.is_dir():
            sync(self.path)

    def there(self) -> list[Path]:
        """See `Output.there`: all parts, and their lists of row errors."""
        there = self.path.iterdir() if self.path.is_dir() else ()
        return [path for path in there if is_of_parts(path.name)]


class ScoredParts:
    """Writes rows with their scores as parts of `rows_per_part` rows; used as `ScoredFile` is.

    When a part is in place, the journal notes that, and forgets the scores of its rows: so a run that
    continues begins after the last part. A part that is in place when its process dies, before the journal
    notes it, is made again under the same name, with the same scores.

    Parameters
    ----------
    folder
        The folder to create.
    work
        The run's folder, with its journal. No chunk in that goes beyond the end of a part.
    layout
        The columns of the rows, which are not ranked.
    rows, rows_per_part
        Rows in all, and in each part but the last.
    about
        Returns the metadata of a part.
    tally
        Returns what the journal is to keep of the caller's sums over the rows so far.
    """

    def __init__(
        self,
        folder: Path,
        work: Workspace,
        layout: Layout,
        rows: int,
        rows_per_part: int,
        about: Callable[[], Mapping[str, str]],
        tally: Callable[[], str],
    ) -> None:
        self.path = folder
        self.errors_path = folder / "_part-*.errors.jsonl"
        self._folder = PartsFolder(folder)
        self._work = work.folder
        self._made = work.made
        self._check = work.check
        self._layout = layout
        self._rows_per_part = rows_per_part
        self._journal = journal = work.journal
        self._about = about
        self._tally = tally
        self._count = max(-(-rows // rows_per_part), 1)
        self._file: ScoredFile | None = None
        self._done = journal.finished.parts
        self.rows = journal.finished.rows
        self.row_errors = journal.finished.row_errors
        self._open()

    @property
    def last(self) -> ScoredFile | None:
        """The file that `publish` moves into place, if there is one left."""
        return self._file

    def write(self, part: ScoredTable) -> None:
        """Append the rows of a chunk, none of which belong to another part; publish a part that is full."""
        assert self._file is not None
        before = self._file.row_errors
        self._file.write(part)
        self.rows += len(part.table)
        self.row_errors += self._file.row_errors - before
        if self._file.rows == self._rows_per_part and self._done + 1 < self._count:
            self.finish(self._about())
            self._publish()
            self._open()

    def finish(self, metadata: Mapping[str, str]) -> None:
        """Complete the file of the part, and sync it."""
        if self._file:
            numbers = {PART: str(self._done + 1), PARTS: str(self._count)}
            self._file.finish({**metadata, **numbers})

    def publish(self, journal: Journal) -> None:
        """Move the last part into place."""
        self._publish()

    def __enter__(self) -> ScoredParts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file:
            self._file.__exit__(kind, error, trace)
        if isinstance(error, InputChanged):  # parts may be from before or after the change
            self._folder.clear()
        elif error and self._done:
            error.add_note(f"{self._done:,} of {self._count:,} parts are in {self.path}")

    def _open(self) -> None:
        """Begin the next part, if there is one."""
        if self._done < self._count:
            name = part_name(Part(self._done + 1, self._count), default_ending(self._layout.form.kind))
            self._file = ScoredFile(self.path / name, self._work, self._layout, self.rows, self._made)

    def _publish(self) -> None:
        if self._file is None:
            return
        self._check()
        self._file.publish()
        self._file.__exit__(None, None, None)
        self._file = None
        self._done += 1
        first = self._journal.first
        finished = Finished(
            parts=self._done, rows=self.rows, row_errors=self.row_errors, first=first, tally=self._tally()
        )
        self._journal.finish(finished)
