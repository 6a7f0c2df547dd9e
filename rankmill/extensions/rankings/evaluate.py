"""Measures rankings before and after reranking, with ir-measures."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from rankmill.extensions.rankings.scored import (
    choose_score_column,
    is_output,
    is_table,
    lacks_passages,
    read_rows,
    run_scores,
    scored_column,
)
from rankmill.jobs.contract.errors import ConfigError, InputError
from rankmill.jobs.runtime.installation import install_line
from rankmill.producer.files.corpus.rankings import check_once, read_ranking
from rankmill.producer.files.ranking import best_first
from rankmill.producer.files.stores.paths import AnyPath


def read_scored(
    path: AnyPath, score: str | None = None, compared: AnyPath | None = None
) -> tuple[pd.DataFrame, pd.DataFrame | None]:
    """Read a scored file; returns its ranking, and the ranking to compare it with.

    If `compared` is not given, the second ranking is ``None`` in three cases:

    - The file is a TREC run.
    - The file has neither the scores nor the ranks of the run from which it was made.
    - The file lacks some passages of this run.

    Each ranking has the columns ``query_id``, ``doc_id`` and ``score``, and lacks rows without a score.

    Parameters
    ----------
    path
        An output of score-file, or a TREC run.
    score
        Name of the column with the scores; by default, `choose_score_column` finds it.
    compared
        A run or an output to compare with; by default, the run that was scored to make the file.

    Raises
    ------
    InputError
        A file cannot be read or lacks ids or scores, or a query has a passage twice.
    """
    score = choose_score_column(path, score)
    if path.is_file() and is_table(path, score):
        after, before, is_cut = _of_table(path, score)
    else:
        after, before, is_cut = ranking_frame(path), None, False
    if compared is not None and is_output(compared):
        before, *_ = _of_table(compared, scored_column(compared, "score"))
    elif compared is not None:
        before = ranking_frame(compared)
    elif before is not None and is_cut:
        before = None
        logger.warning(
            "%s lacks passages of its run, as after --top-k; name the run to compare with: --run RUN", path
        )
    return after, before


def _of_table(path: AnyPath, score: str) -> tuple[pd.DataFrame, pd.DataFrame | None, bool]:
    """Read an output of score-file: its ranking, the ranking of the run that was scored, and whether the
    output lacks passages of this run.
    """
    frame = read_rows(path, score)
    is_cut = lacks_passages(frame)
    frame = frame[frame["in_run"]]  # other rows are judged passages that the run lacks
    after, before = _ranking(frame, frame["score"]), run_scores(frame)
    check_once(after, path)
    return after, None if before is None else _ranking(frame, before), is_cut


def ranking_frame(path: AnyPath) -> pd.DataFrame:
    """Read a run as a ranking by the run's scores, or else by its ranks, or else in the order of the file.

    If only some rows have the score or rank that is used, the others are left out.

    Raises
    ------
    InputError
        The file is not a run, or a query has a passage twice.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    batches = list(read_ranking(path))
    if not batches:
        raise InputError(f"{path}: the run is empty")
    frame: pd.DataFrame = pa.Table.from_batches(batches).to_pandas()
    check_once(frame, path)
    scores = run_scores(frame)
    return _ranking(frame, -frame.index.to_series().astype(float) if scores is None else scores)


def _ranking(frame: pd.DataFrame, scores: pd.Series[float]) -> pd.DataFrame:
    return frame[["query_id", "doc_id"]].assign(score=scores).dropna()


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Result:
    """The values of one measure, before and after reranking.

    Without a ranking to compare with, ``before``, ``better``, ``worse``, ``p_value`` and ``before_ranked``
    are ``None``.

    Attributes
    ----------
    after, before
        Means over all judged queries. A measure that counts, such as ``NumRet``, has sums in place of means.
    better, worse
        Numbers of queries whose value is higher, or lower, after reranking.
    p_value
        The p-value of a two-sided paired t-test over all judged queries. It is also ``None`` if no query has
        changed, or if only one query is judged.
    judged
        Number of judged queries.
    ranked
        Number of judged queries that have passages after reranking.
    after_ranked, before_ranked
        As ``after`` and ``before``, but over the ``ranked`` queries only.
    """

    measure: str
    after: float
    before: float | None
    better: int | None
    worse: int | None
    p_value: float | None
    judged: int
    ranked: int
    after_ranked: float
    before_ranked: float | None
    by_query: dict[str, tuple[float | None, float]]
    """The measure's values before and after reranking for each judged query: ``{query: (before, after)}``."""


def evaluate(
    after: pd.DataFrame, before: pd.DataFrame | None, qrels: pd.DataFrame, measures: Sequence[str]
) -> list[Result]:
    """Measure the rankings before and after reranking. A judged query without passages counts as 0, as in
    trec_eval's ``-c``.

    Parameters
    ----------
    after, before
        Rankings with columns ``query_id``, ``doc_id``, ``score``.
    qrels
        Judgements with columns ``query_id``, ``doc_id``, ``relevance``.
    measures
        Names of ir-measures, such as ``nDCG@10``, ``RR@10`` (MRR), ``R@100`` (recall), ``AP``.

    Raises
    ------
    InputError
        A measure is missing or unknown or cannot be computed, or no query of the ranking is judged.
    ConfigError
        ir-measures is not installed.
    """
    metrics = [_measure(name) for name in measures]
    if not metrics:
        raise InputError("--measures: name a measure, such as nDCG@10")
    judged = set(qrels["query_id"])
    if not judged & set(after["query_id"]):
        raise InputError("no query of the ranking has a judgement; do the ids of queries belong together?")
    missing = len(judged - set(after["query_id"]))
    if missing:
        logger.warning(
            "%d of %d judged queries are not in the ranking; they count as 0", missing, len(judged)
        )
    new = _values(metrics, qrels, after)
    old = None if before is None else _values(metrics, qrels, before)
    ranked = sorted(judged & set(after["query_id"]))
    return [
        _result(measure, new[name], old[name] if old else {}, ranked)
        for name, measure in {str(each): each for each in metrics}.items()
    ]


def _measure(name: str) -> Any:
    try:
        import ir_measures
    except ImportError:
        raise ConfigError(f"measures need ir-measures: {install_line('rankings')}") from None
    try:
        measure = ir_measures.parse_measure(name)
        str(measure)  # raises a KeyError if `name` has a parameter that the measure lacks
    except (NameError, ValueError, TypeError, SyntaxError, AssertionError, KeyError):
        measure = None
    if measure is None or measure.params.get("cutoff") == 0:  # with 0, pytrec_eval aborts the process
        raise InputError(f"--measures: {name!r} is not a measure of ir-measures, such as nDCG@10")
    return measure


def _values(measures: Sequence[Any], qrels: pd.DataFrame, run: pd.DataFrame) -> dict[str, dict[str, float]]:
    import ir_measures

    # pytrec_eval crashes if a query has only negative grades. Negative grades become 0, because 0 also means
    # not relevant.
    best = qrels.groupby("query_id")["relevance"].transform("max")
    qrels = qrels.assign(relevance=qrels["relevance"].mask(best < 0, 0))
    # The libraries behind ir-measures order equal scores in different ways. So each query's passages get the
    # scores -1, -2, -3 and so on, in trec_eval's order.
    ids, scores = pa.array(run["doc_id"], pa.string()), run["score"].to_numpy(np.float64)
    run = run.iloc[best_first(pd.factorize(run["query_id"])[0], scores, ids)]
    run = run.assign(score=-1.0 - run.groupby("query_id").cumcount())
    by_measure: dict[str, dict[str, float]] = {str(measure): {} for measure in measures}
    try:
        for metric in ir_measures.iter_calc(measures, qrels, run):
            by_measure[str(metric.measure)][metric.query_id] = float(metric.value)
    except Exception as error:  # for example, a measure lacks its cutoff, or a library is not installed
        reason = re.sub(r"=<object object at \w+>", ", which is missing", " ".join(str(error).split()))
        names = ", ".join(by_measure)
        raise InputError(f"--measures: ir-measures cannot compute {names}: {reason}") from error
    queries = sorted(set(qrels["query_id"]))
    return {name: {query: values.get(query, 0.0) for query in queries} for name, values in by_measure.items()}


def _result(measure: Any, new: dict[str, float], before: dict[str, float], ranked: Sequence[str]) -> Result:
    return Result(
        str(measure),
        after=_total(measure, new, list(new)),
        before=_total(measure, before, list(before)) if before else None,
        better=sum(new[query] > value for query, value in before.items()) if before else None,
        worse=sum(new[query] < value for query, value in before.items()) if before else None,
        p_value=_p_value([new[query] - value for query, value in before.items()]),
        judged=len(new),
        ranked=len(ranked),
        after_ranked=_total(measure, new, ranked),
        before_ranked=_total(measure, before, ranked) if before else None,
        by_query={query: (before.get(query), value) for query, value in new.items()},
    )


def _total(measure: Any, values: Mapping[str, float], queries: Sequence[str]) -> float:
    """Return the mean of a measure's values over some queries. For a measure that counts, such as ``NumRet``,
    return the sum, as ir-measures does.
    """
    total = measure.aggregator()
    for query in queries:
        total.add(values[query])
    return float(total.result())


def _p_value(changes: Sequence[float]) -> float | None:
    """Return the p-value of a paired t-test of the queries' changes; ``None`` if there are fewer than two
    queries, or no query has changed.
    """
    from scipy.stats import ttest_1samp  # comes with ir-measures

    if len(changes) < 2 or not any(changes):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # scipy warns if all changes are equal
        return float(ttest_1samp(changes, 0.0).pvalue)
