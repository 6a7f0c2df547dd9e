"""The names of the columns of scores in an output, and their values in each table of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.contract.file_request import FileRequest
from rankmill.jobs.contract.wire import outputs
from rankmill.jobs.runtime.settings import Settings


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
        names several columns of scores, but not one for each model or for each column of conversations.
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


def with_scores(table: pa.Table, names: Sequence[str], scores: pa.Array) -> pa.Table:
    """Append scores to a table, in one column for each of the `names`."""
    for name, column in zip(names, _split(scores, len(names)), strict=True):
        table = table.append_column(pa.field(name, pa.float32()), column)
    return table


def _split(scores: pa.Array, columns: int) -> list[pa.Array]:
    if outputs(scores) == columns:
        return [pc.list_element(scores, at) for at in range(columns)]
    if columns > 1:  # no row of the table has scores
        return [pa.nulls(len(scores), pa.float32()) for _ in range(columns)]
    return [scores]
