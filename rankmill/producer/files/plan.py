"""Plans the columns of an output, and the order of its rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.contract.file_request import FileRequest
from rankmill.jobs.runtime.settings import Settings
from rankmill.producer.files.formats.base import ROW, text_of, undictionaried
from rankmill.producer.files.formats.jsonl import JSONL
from rankmill.producer.files.formats.text import (
    cannot_be_text,
    far_time,
    texts_of,
    undictionary,
    without_times,
)
from rankmill.producer.files.formats.trec import TREC
from rankmill.producer.files.outputs import OutputFormat
from rankmill.producer.files.ranking import HeldRows, MeanColumn, Repeats
from rankmill.producer.files.source import PairSource
from rankmill.producer.files.stores.paths import AnyPath


@dataclass(frozen=True)
class OutputPlan:
    """The columns of an output, and the order of its rows.

    Parameters
    ----------
    form
        The format of the output.
    needed
        Columns of the input that the output needs.
    schema
        The schema of the output's file.
    scores
        Names of the float32 columns of scores; a row with an error has null there.
    group
        The column that tells queries apart, or ``None`` if rows are neither ranked nor averaged.
    mean
        The column with the mean of several models' scores, if the output has one.
    is_ranked
        Whether the rows of each query are ranked by score.
    tokens
        The int32 column with each row's number of tokens, if the output has one.
    passage
        The column of the passages' ids in a TREC run; it decides the order of equal scores.
    """

    form: OutputFormat
    needed: Sequence[str]
    schema: pa.Schema
    scores: Sequence[str]
    group: str | None = None
    mean: MeanColumn | None = None
    is_ranked: bool = False
    tokens: str | None = None
    passage: str | None = None

    def held_rows(self, folder: Path) -> HeldRows | None:
        """Make a store for rows that wait until all have scores. Returns ``None`` if rows are neither ranked
        nor averaged.
        """
        if self.group is None:
            return None
        rank = self.form.rank_column if self.is_ranked else None
        return HeldRows(folder, self.group, self.scores, self.mean, rank, self.form.top_k, self.passage)

    @property
    def score(self) -> str:
        """Name of the column of scores, or of their mean, by which rows are ranked."""
        return self.mean.name if self.mean else self.scores[-1]


def names_of_score_columns(
    request: FileRequest, settings: Settings, ask: Callable[[], Sequence[str]]
) -> list[str]:
    """Return the names of an output's columns of scores.

    Parameters
    ----------
    request
        What the user wants to have scored.
    settings
        The settings.
    ask
        Returns the labels of the model, if it has several outputs. Called only if ``all_labels`` is set.

    Raises
    ------
    InputError
        Two models, or two columns of conversations, would have the same column of scores. Or the request
        names several columns of scores, but not as many as there are models or columns of conversations.
    """
    if request.models:
        return _columns_of_models(request.score_column, request.models)
    if len(request.messages_column) > 1:
        return _columns_of_models(request.score_column, request.messages_column)
    column, labels = request.score_column, ask() if settings.all_labels else ()
    return [f"{column}_{label}" for label in labels] or [column]


def _columns_of_models(option: str, models: Sequence[str]) -> list[str]:
    names = option.split(",")
    if len(names) == 1:
        names = [f"{option}_{model.rstrip('/').rpartition('/')[2]}" for model in models]
    if len(names) != len(models) or not all(names):
        raise InputError(
            f"--score-column {option} names {len(names)} columns for {len(models)} models: name one for each"
        )
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"two models would be in column {name}; name each: --score-column NAME,NAME")
    return names


def plan_output(
    source: PairSource,
    target: AnyPath,
    form: OutputFormat,
    scores: Sequence[str],
    left_out: Collection[str] = (),
    mean: MeanColumn | None = None,
    tokens: str | None = None,
) -> OutputPlan:
    """Plan the columns and the order of an output, and check that its format can hold the values.

    For a TREC run, the check reads the ids. For other formats of text, it reads the columns with times.

    Parameters
    ----------
    source
        The input.
    target
        The place of the output.
    form
        The format of the output, and the ranking of its rows.
    scores
        Names of the columns of scores.
    left_out
        Columns of the input that the output does not have.
    mean
        The column with the mean of several models' scores, if there is one.
    tokens
        Name of the column with each row's number of tokens, if there is one.

    Raises
    ------
    InputError
        The input has a column with the name of a new one, or lacks ids; or an id or a time cannot be written;
        or a query of a TREC run has a passage twice.
    OutputError
        The ids of a TREC run do not fit into the temporary folder.
    """
    is_trec = form.of(target) is TREC
    kept = [name for name in source.schema.names if name not in left_out]
    if is_trec:
        kept = list(dict.fromkeys(form.ids(source.schema)))
    elif source.carries and form.of(target) is JSONL:
        kept = [ROW]
    elif reserved := next((name for name in kept if name.startswith(ROW)), None):
        raise InputError(f"the name of column {reserved!r} begins with a NUL character; rename it")
    of_scores, of_ranks = ("name the new one with --score-column", "name the new one with --rank-column")
    added = [(pa.field(score, pa.float32()), of_scores) for score in scores]
    if mean:
        added.append((pa.field(mean.name, pa.float32()), of_ranks if mean.of == "ranks" else of_scores))
    added += [(pa.field(tokens, pa.int32()), "rename that one")] if tokens else []
    is_ranked = form.ranks(target)
    added += [(pa.field(form.rank_column, pa.int32()), of_ranks)] if is_ranked else []
    group = form.group(source.schema, source.columns.query) if is_ranked or mean else None
    if is_trec:
        _check_ids(source, kept)
    schema = _with(source.schema, kept, added)
    _check_times(source, target, form, kept)
    passage = kept[-1] if is_trec else None
    needed = list(dict.fromkeys([*kept, *([group] if group else [])]))
    return OutputPlan(form, needed, schema, scores, group, mean, is_ranked, tokens, passage)


def _with(schema: pa.Schema, kept: Sequence[str], added: Sequence[tuple[pa.Field, str]]) -> pa.Schema:
    """Make the schema of an output from columns of the input and added columns, such as the scores.

    Each added column comes with advice to the user, for the case that the input already has a column of this
    name.
    """
    of_input = list(schema.names if ROW in kept else kept)
    own = [pa.field(ROW, pa.string()) if name == ROW else schema.field(name) for name in kept]
    fields: list[pa.Field] = []
    for field, way_out in added:
        if field.name in of_input:
            raise InputError(f"the input has a column {field.name!r} already; {way_out}")
        if field.name in {other.name for other in fields}:
            raise InputError(f"the output has a column {field.name!r} already; {way_out}")
        fields.append(field)
    return pa.schema([*own, *fields], metadata=schema.metadata)


def _check_times(source: PairSource, target: AnyPath, form: OutputFormat, kept: Sequence[str]) -> None:
    """Raise `InputError` if the output is text, and would have a time that Arrow cannot print."""
    own = form.of(target)
    if ROW in kept or not own.is_text:
        return
    kinds = {name: undictionaried(source.schema.field(name).type) for name in kept}
    # nested columns are checked only for JSON Lines, because no other text format can hold them
    fitting = [name for name, kind in kinds.items() if own is JSONL or not pa.types.is_nested(kind)]
    fitting = [name for name in fitting if not cannot_be_text(kinds[name])]
    names = [name for name in fitting if without_times(kinds[name]) != kinds[name]]
    first = 0
    for batch in source.select(names) if names else ():
        for name in names:
            try:
                row = far_time(undictionary(batch[name]))
            except pa.ArrowInvalid as error:
                raise InputError(f"{target}: the times of column {name!r}: {text_of(error)}") from None
            if row is not None:
                raise InputError(
                    f"{target}: row {first + row} (counted from 0): column {name!r} holds a time that text "
                    "cannot hold, as its year is too far away; name an output that ends in .parquet"
                )
        first += len(batch)


def _check_ids(source: PairSource, ids: Sequence[str]) -> None:
    """Raise `InputError` if a query has a passage twice, or if a TREC run cannot hold an id. An id must not
    be null or empty, or have spaces.
    """
    row, repeats = 0, Repeats(ids[0], ids[-1])
    for batch in source.select(ids):
        for name in ids:
            _check_spaces(batch[name], name, row)
        repeats.add(batch)
        row += len(batch)
    if twice := repeats.first(lambda: source.select(ids)):
        raise InputError(f"query {twice[0]!r} has passage {twice[1]!r} twice; a TREC run may have it once")


def _check_spaces(column: pa.Array, name: str, first: int) -> None:
    bad = pc.invert(pc.fill_null(pc.match_substring_regex(texts_of(column), r"^\S+$"), False))
    place = pc.index(bad, True).as_py()
    if place >= 0:
        value = column[place].as_py()
        raise InputError(
            f"row {first + place} (counted from 0): {name} is {value!r}; a TREC run needs ids without spaces"
        )
