"""The RQ job `rankmill.score_pairs`, which callers enqueue by name. Its arguments contain the pairs, and its
result the scores.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ValidationError
from rq.job import Job

from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.contract.priority import run_id_of_request
from rankmill.jobs.contract.results import ChunkScores
from rankmill.jobs.contract.run import Run
from rankmill.jobs.contract.spec import ScoreSpec, complaint
from rankmill.jobs.contract.wire import is_pair, mended, outputs
from rankmill.jobs.system import system

PAIRS_FUNCTION = "rankmill.score_pairs"

MAX_PAIRS = 1024
"""One job contains at most this many pairs; its JSON has at most `rankmill.jobs.protocol.set_aside.MAX_DATA`
bytes.
"""

DEATHS = 3
"""If the worker of a job of pairs dies, the job runs again even if it was enqueued without retries, but at
most this many times.
"""

DAY = 86400

_REFUSALS_SECONDS = 3600
"""Seconds for which Redis keeps the reasons why workers refuse a job of pairs."""

Text = str | None


def read_pairs(job: Job) -> tuple[list[Text], list[Text]]:
    """Read the queries and passages of a job, ``[n]`` each.

    Raises
    ------
    InputError
        The job has no list of pairs, too many pairs, a pair that is not two texts, or other arguments.
    """
    given = job.kwargs.get("pairs") if not job.args else job.args[0]
    if len(job.args) + ("pairs" in job.kwargs) != 1 or not isinstance(given, list):
        raise InputError(f"{PAIRS_FUNCTION} takes one list of pairs, and the rest by name")
    if len(given) > MAX_PAIRS:
        raise InputError(f"{PAIRS_FUNCTION} takes at most {MAX_PAIRS:,} pairs, not {len(given):,}")
    for row, pair in enumerate(given):
        if not is_pair(pair):
            raise InputError(f"pair {row} is {_kinds(pair)}, not a query and a passage (two strings)")
    return [mended(query) for query, _ in given], [mended(passage) for _, passage in given]


def _kinds(pair: object) -> str:
    """Name the types of a wrong pair's items for an error message, such as ``[int, str]``.

    The message has no texts, because workers log it.
    """
    if not isinstance(pair, list):
        return type(pair).__name__
    return f"[{', '.join(type(part).__name__ for part in pair)}]"[:80]


def read_request(job: Job) -> Run:
    """Make a run from the model and options of a job of pairs. This run is not in Redis.

    Raises
    ------
    InputError
        An argument is not a field of `ScoreSpec`, or its value is not allowed, or the job is not for pairs.
    """
    try:
        spec = ScoreSpec(**{name: value for name, value in job.kwargs.items() if name != "pairs"})
    except ValidationError as error:
        wrong = complaint(error, {*ScoreSpec.model_fields, "pairs"})
        raise InputError(f"{PAIRS_FUNCTION}: {wrong}") from None
    if spec.inputs != "pairs":
        raise InputError(f"{PAIRS_FUNCTION} scores pairs; for {spec.inputs}, use rankmill.Client")
    return Run(
        id=run_id_of_request(job.id),
        spec=spec,
        queue=job.origin,
        ttl=_REFUSALS_SECONDS,
        max_retries=job.retries_left or 0,
        created=system.now(),
    )


def survives(job: Job) -> None:
    """Allow a job of pairs whose worker died to run again, even if its caller asked for no retries."""
    if job.func_name == PAIRS_FUNCTION and job.retries_left is None:
        job.retries_left = DEATHS


def return_value(result: ChunkScores) -> Mapping[str, object]:
    """Return the job's result as JSON: scores, rows without a score, and how the job was scored.

    A score is the shortest decimal number that gives the same float32. With ``all_labels``, it is a list of
    numbers.
    """
    labels, reasons = outputs(result.scores), result.errors.to_pylist()
    scored = result.scores.drop_null()
    flat = [float(str(number)) for number in (scored.flatten() if labels else scored).to_numpy()]
    numbers = iter([flat[at : at + labels] for at in range(0, len(flat), labels)] if labels else flat)
    return {
        "scores": [None if reason is not None else next(numbers) for reason in reasons],
        "errors": [{"row": row, "error": reason} for row, reason in enumerate(reasons) if reason is not None],
        "stats": result.stats.model_dump(
            exclude={"attempt", "device_name", "device_seconds", *([] if labels else ["labels"])}
        ),
    }
