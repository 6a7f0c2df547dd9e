"""Holds the work of an engine: the tokenized pairs of a chunk, and their scores so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import numpy.typing as npt

from rankmill.jobs.contract.errors import RowFault, SpecError, too_long
from rankmill.jobs.contract.wire import MAX_CHUNK_BYTES, MAX_TEXT_CHARS, names_of_texts, text_fault
from rankmill.workers.backends.base import DeviceLost, Logits, is_panic
from rankmill.workers.batches.planner import Rows
from rankmill.workers.batches.tokens import Tokens
from rankmill.workers.models.loading import Model

Texts = Sequence[str | None]

_MOST_FOUND = MAX_CHUNK_BYTES // 2
"""The results of a chunk that asks for tokens have at most this many bytes. A row beyond this limit gets an
error.
"""


@dataclass
class PairScores:
    """Scores of `n` pairs, with the tokens and batches that they took.

    Attributes
    ----------
    scores
        Float32, ``[n]`` or ``[n, labels]``; NaN for rows in ``errors``.
    errors
        Why a row has no score, by the row's index.
    tokens, padded_tokens
        Number of tokens without padding, and with it.
    batches
        Number of batches with at least one of the pairs.
    windows
        Number of windows into which long passages were cut.
    faults
        The kind of each error in ``errors``, by the row's index.
    """

    scores: npt.NDArray[np.float32]
    errors: dict[int, str] = field(default_factory=dict)
    tokens: int = 0
    padded_tokens: int = 0
    batches: int = 0
    windows: int = 0
    faults: dict[int, RowFault] = field(default_factory=dict)

    def fail(self, row: int, kind: RowFault, reason: str) -> None:
        # a template's error may quote a lone surrogate, which UTF-8 does not have
        self.errors[row], self.faults[row] = reason.encode(errors="replace").decode(), kind

    def fail_tokenizer(self, row: int, error: BaseException) -> None:
        self.fail(row, "tokenizer", f"tokenizer: {reason_of(error)}")


@dataclass(eq=False)
class Work:
    """The pairs of a chunk, with their tokens and their scores so far.

    Attributes
    ----------
    tokens, rows
        Tokens of the rows, and the index of each row's pair; a pair has one row for each of its windows.
    scored
        Scores of the pairs.
    left
        Number of rows that have neither a score nor an error yet.
    seconds
        Seconds of the chunk's stages, by name.
    apart
        The scores of the rows, if a pair's score is the mean over several windows, or else ``None``.
    found
        The results of rows that ask for tokens, as JSON; ``None`` if the rows ask for scores.
    """

    tokens: Tokens
    rows: Rows
    scored: PairScores
    left: int
    seconds: dict[str, float] = field(default_factory=dict)
    apart: Logits | None = None
    found: list[str | None] | None = None

    def pairs_in(self, rows: Rows) -> int:
        """Return the number of pairs whose first window is among `rows`; a pair that is not cut is one
        window.
        """
        if not self.scored.windows:
            return len(rows)
        return int(np.sum((rows == 0) | (self.rows[rows - 1] != self.rows[rows])))

    @property
    def row_tokens(self) -> npt.NDArray[np.int32]:
        """Number of tokens of each pair ``[n]``, which is the sum over its windows.

        A pair that has no row, such as one that cannot be tokenized, counts 0.
        """
        return np.bincount(self.rows, self.tokens.lengths, len(self.scored.scores)).astype(np.int32)


def prepare(model: Model, queries: Texts, passages: Texts | None = None) -> Work:
    """Tokenize pairs ``[n]``, or single texts if `passages` is ``None``.

    A pair gets an error if a text is missing, too long or cannot be tokenized.
    """
    scored = PairScores(model.no_scores(len(queries)))
    pieces: list[tuple[Rows, Tokens]] = []

    def tokenize(part: Rows) -> None:
        places = part.tolist()
        first_texts = [queries[row] or "" for row in places]
        second_texts = None if passages is None else [passages[row] or "" for row in places]
        counts = np.ones(len(part), np.intp)
        if model.short_passages and second_texts is not None:
            second_texts = model.short_passages.cut(second_texts)
        if model.windows:
            of, first_texts, second_texts = model.windows.cut(first_texts, second_texts)
            counts, part = np.bincount(of), part[of]
        tokens = model.tokenizer(first_texts, second_texts)
        if not tokens.lengths.all():
            raise ValueError(f"the {_row_of(model)} has no tokens")
        pieces.append(_fitting(model, part, tokens, scored))
        scored.windows += int(counts[counts > 1].sum())

    with model.lock:
        bisect(_with_texts(model, queries, passages, scored), tokenize, scored.fail_tokenizer)
    rows = np.concatenate([np.zeros(0, np.intp), *(part for part, _ in pieces)])
    work = Work(Tokens.join([tokens for _, tokens in pieces]), rows, scored, len(rows))
    if model.averages and scored.windows:
        work.apart = model.no_scores(len(rows))
    return work


def encode(model: Model, requests: Texts) -> Work:
    """Answer the rows ``[n]`` of a chunk that ask for tokens, or for the text of tokens.

    The result needs no scoring: ``found`` has the answers, and the score of a row is its number of tokens.
    """
    assert model.encoder
    encoder, room = model.encoder, _MOST_FOUND
    scored = PairScores(model.no_scores(len(requests)))
    results: list[str | None] = [None] * len(requests)

    def find(part: Rows) -> None:
        nonlocal room
        places = part.tolist()
        for row, tokens in zip(places, encoder([requests[row] or "" for row in places]), strict=True):
            text = tokens.model_dump_json()
            room -= len(text.encode())
            if room < 0:
                scored.fail(row, "tokenizer", "tokenizer: there are too many tokens for one result")
                continue
            results[row], scored.scores[row] = text, len(tokens.ids)
            scored.tokens += len(tokens.ids)

    bisect(_with_texts(model, requests, None, scored), find, scored.fail_tokenizer)
    return Work(Tokens.join([]), np.zeros(0, np.intp), scored, 0, found=results)


def _row_of(model: Model) -> str:
    return model.inputs.removesuffix("s")


def _with_texts(model: Model, queries: Texts, passages: Texts | None, scored: PairScores) -> Rows:
    """Return the indices of the rows whose texts can be tokenized; other rows get an error in `scored`."""
    columns = (queries,) if passages is None else (queries, passages)
    names = names_of_texts(model.inputs)
    alike = len(set(map(len, columns))) == 1
    if alike and not any(text is None or len(text) > MAX_TEXT_CHARS for text in chain(*columns)):
        return np.arange(len(queries))
    complete = []
    for row, texts in enumerate(zip(*columns, strict=True)):
        if fault := text_fault(dict(zip(names, texts, strict=True))):
            scored.fail(row, *fault)
        else:
            complete.append(row)
    return np.asarray(complete, dtype=np.intp)


def _fitting(model: Model, part: Rows, tokens: Tokens, scored: PairScores) -> tuple[Rows, Tokens]:
    """Return the pairs of `part` (indices in the chunk) that are not too long, and their tokens.

    The other pairs get an error in `scored`.
    """
    most = model.refused_over
    if most is None or (fits := tokens.lengths <= most).all():
        return part, tokens
    for row, length in zip(part[~fits].tolist(), tokens.lengths[~fits].tolist(), strict=True):
        scored.fail(row, "too_long", too_long(_row_of(model), length, most))
    return part[fits], tokens.take(np.flatnonzero(fits))


def reason_of(error: BaseException) -> str:
    """Return the type and the text of an error in one line, as the reason for a row without a score."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def bisect(rows: Rows, run: Callable[[Rows], None], broken: Callable[[int, BaseException], None]) -> None:
    """Call `run` with `rows`. If it raises an error, run each half of the rows, and so on.

    For a row that fails by itself, `broken` is called with the row and its error. `DeviceLost` is raised, and
    so is `SpecError`, which concerns the whole model.
    """
    if not len(rows):
        return
    try:
        run(rows)
    except (DeviceLost, SpecError):
        raise
    except BaseException as error:
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        if len(rows) == 1:
            broken(int(rows[0]), error)
            return
        middle = len(rows) // 2
        bisect(rows[:middle], run, broken)
        bisect(rows[middle:], run, broken)
