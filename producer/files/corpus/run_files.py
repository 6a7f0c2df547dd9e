"""The files of a run: quick to import, because every score-file names them."""

from __future__ import annotations

from dataclasses import dataclass

from rankmill.producer.files.inputs import InputFile


@dataclass(frozen=True)
class RunFiles:
    """The files of a run.

    ``depth`` is the number of passages to take of each query, by rank. Judgements (``qrels``) add columns:
    ``relevance`` of each passage, null where it is not judged, and ``in_run``; and relevant passages that
    are not in the run (or deeper) come after its rows, for the queries that it has.
    """

    run: InputFile
    queries: tuple[InputFile, ...]
    corpus: tuple[InputFile, ...]
    depth: int | None = None
    qrels: InputFile | None = None

    @property
    def all(self) -> tuple[InputFile, ...]:
        """Every file."""
        return (self.run, *self.queries, *self.corpus, *([self.qrels] if self.qrels else []))
