"""Compares two models on a file: how they rank, how fast they are, and where they differ."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from rankmill.extensions.lab.pairs import FileSample
from rankmill.extensions.lab.precision import Measured, compare, score_sample
from rankmill.extensions.registry.models import RegistryModels
from rankmill.jobs.model_names import ModelNames
from rankmill.jobs.runtime.settings import Settings
from rankmill.score.session import Session

_WARM_ROWS = 64


@dataclass(frozen=True)
class Side:
    """One of two compared models, and what was measured with it.

    Attributes
    ----------
    measured
        How well the model's rankings agree with those of the first model, and other figures.
    scores
        The model's score of each row, float32 ``[n]``; NaN for rows without a score.
    """

    model: str
    measured: Measured
    pairs_per_second: float
    scores: npt.NDArray[np.float32]

    @property
    def figures(self) -> dict[str, str]:
        measured = self.measured
        where = f"{measured.backend}, {measured.device}, {measured.precision}"
        return {"runs on": where, "pairs/s": f"{self.pairs_per_second:,.0f}", **measured.figures}


@dataclass(frozen=True)
class Difference:
    """How two models rank the passages of a query: the rank correlation, and the passage that each ranks
    first.
    """

    query: str
    spearman: float
    first: str
    second: str


@dataclass(frozen=True)
class ModelComparison:
    """How two models compare on a sample. The first model is the reference.

    Attributes
    ----------
    sides
        What was measured with the first and the second model.
    differences
        The queries whose passages the models rank most differently, the largest difference first.
    spearman
        The rank correlation of each query. A query is left out if a model gave all its passages the same
        score.
    """

    sides: tuple[Side, Side]
    differences: tuple[Difference, ...]
    spearman: npt.NDArray[np.float64]


def compare_models(
    models: tuple[str, str], sample: FileSample, shown: int, settings: Settings
) -> ModelComparison:
    """Score a sample of the input with two models, and compare the scores.

    Parameters
    ----------
    models
        Names of the models; the second is compared with the first.
    sample
        The rows to score; without a column of labels there is no nDCG.
    shown
        Maximum number of queries in ``differences``.
    settings
        The server or the embedded workers, and all options but the model.

    Raises
    ------
    InputError
        A model is not in the registry, the files cannot be read, the rows cannot be compared, or no worker
        can score with one of the models.
    """
    names = ModelNames(settings, lambda: [RegistryModels])
    first, second = (names.pin(model) for model in models)
    with Session(settings.model_copy(update={"model": first})) as session:
        table = sample.read()
        runs = []
        for model in (first, second):
            few = table.slice(0, _WARM_ROWS)  # the first request loads the model, and its time does not count
            for rows in (few, table):
                scored = score_sample(session, rows, sample.columns, f"with {model}", model=model)
            runs.append(scored)
    queries = table[sample.columns.query].to_pylist()
    labels = None if sample.label is None else table[sample.label].to_pylist()
    one, two = (
        Side(model, compare(scored, runs[0], queries, labels), len(table) / scored.seconds, scored.scores)
        for model, scored in zip((first, second), runs, strict=True)
    )
    by_query = _by_query(queries, table[sample.columns.passage].to_pylist(), one.scores, two.scores)
    return ModelComparison(
        (one, two), tuple(by_query[:shown]), np.array([difference.spearman for difference in by_query])
    )


def _by_query(
    queries: list[str], passages: list[str], one: npt.NDArray[np.float32], two: npt.NDArray[np.float32]
) -> list[Difference]:
    """Compare how two models rank the passages of each query; return the largest difference first."""
    rows = pd.DataFrame({"query": queries, "passage": passages, "one": one, "two": two}).dropna()
    differences = []
    for query, theirs in rows.groupby("query", sort=False):
        spearman = float(theirs[["one", "two"]].corr("spearman").to_numpy()[0, 1])
        if not np.isnan(spearman):
            first, second = (theirs["passage"].iloc[theirs[side].argmax()] for side in ("one", "two"))
            differences.append(Difference(str(query), spearman, first, second))
    return sorted(differences, key=lambda difference: difference.spearman)
