"""The columns of scores in an output: one, or one for each label or model, and perhaps their mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.runtime.settings import Settings
from rankmill.producer.files.mean_scores import MeanColumn
from rankmill.score.request import Request


def score_columns(request: Request, settings: Settings, ask: Callable[[], Sequence[str]]) -> list[str]:
    """Names of the columns of scores; `ask` returns the labels of the model, if it has several.

    Raises
    ------
    InputError
        Two models would have the same column, or the names are not as many as the models.
    """
    if request.models:
        return _of_models(request.score_column, request.models)
    labels = ask() if settings.all_labels else ()
    return [f"{request.score_column}_{label}" for label in labels] or [request.score_column]


def mean_column(request: Request) -> MeanColumn | None:
    """The column for the mean of several models; ``None`` if there is none."""
    if request.mean is None:
        return None
    name = request.form.rank_column if request.mean == "ranks" else request.score_column.partition(",")[0]
    return MeanColumn(f"{name}_mean", request.mean)


def _of_models(asked: str, models: Sequence[str]) -> list[str]:
    names = asked.split(",")
    if len(names) == 1:
        names = [f"{asked}_{model.rstrip('/').rpartition('/')[2]}" for model in models]
    if len(names) != len(models) or not all(names):
        raise InputError(f"--score-column {asked} names {len(names)} columns for {len(models)} models")
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"two models would be in column {name}; name each: --score-column NAME,NAME")
    return names
