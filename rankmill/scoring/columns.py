"""The columns of scores in an output: one, or one for each label."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jobs.runtime.settings import Settings
from rankmill.scoring.request import Request


def score_columns(request: Request, settings: Settings, ask: Callable[[], Sequence[str]]) -> list[str]:
    """Names of the columns of scores; `ask` returns the labels of the model, if it has several."""
    labels = ask() if settings.all_labels else ()
    return [f"{request.score_column}_{label}" for label in labels] or [request.score_column]
