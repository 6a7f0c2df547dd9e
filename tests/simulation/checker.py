"""What must be true of a simulated cluster; each finding is a sentence, none if all is well."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rankmill.jobs.contract.errors import RankmillError, RunCancelled, RunExpired, RunFailed
from tests.simulation.cluster import NO_MODEL, POISON, Submitted, first_token, score_of
from tests.simulation.world import World


def computed_again(world: World, runs: Sequence[Submitted]) -> list[str]:
    """Whether pairs were computed more often than they were submitted, though nothing went wrong."""
    pairs = [pair for run in runs for pair in run.pairs]
    if any(passage == POISON for _, passage in pairs):
        return []
    asked = Counter(first_token(query, passage) for query, passage in pairs if query and passage)
    again = world.computed - asked
    return [f"{again.total()} pairs were computed again, and nothing went wrong"] if again else []


def left(world: World, detached: set[str], *, lost_data: bool) -> list[str]:
    """Keys that are left of runs whose producers have all scores, and keys of ours that never expire.

    A server that goes back in time has keys of runs that have ended; they expire all the same.
    """
    found = []
    for key, item in world.redis.fake.dbs[0]._dict.items():
        name = key.decode(errors="replace")
        if item.expireat is not None and item.expireat < world.redis.time():
            continue  # it has expired
        if name.endswith(":cancelled"):
            continue  # the note to a producer that has ended meanwhile
        is_left = name.startswith("rankmill:run:") and not any(run in name for run in detached)
        if is_left and not lost_data:
            found.append(f"{name} is left")
        elif name.startswith(("rankmill:", "rq:job:", "rq:execution:")) and item.expireat is None:
            found.append(f"{name} does not expire")
    return found[:5]


def crashes(world: World) -> list[str]:
    found = []
    for _, thread, error in world.crashes:
        at = error.__traceback__
        while at and at.tb_next:
            at = at.tb_next
        where = f"{at.tb_frame.f_code.co_filename.rpartition('/')[2]}:{at.tb_lineno}" if at else "?"
        found.append(f"{thread} ended with {type(error).__name__}: {error} ({where})")
    return found


def wrong(run: Submitted, found: Any, *, lost_data: bool, max_retries: int = 3) -> list[str]:
    """What is wrong with a run's scores."""
    if isinstance(found, RunExpired) and lost_data and run.kind == "detached":
        return []  # it says so: its pairs were in the server alone
    if run.kind == "cancelled" and isinstance(found, RunCancelled):
        return []
    if run.model == NO_MODEL and isinstance(found, RunFailed) and "no such directory" in str(found):
        return []
    if isinstance(found, RankmillError):
        return [f"{run.name} ended with {type(found).__name__}: {found}"]
    if found is None:
        return [f"{run.name} has no scores"]
    if len(found) != len(run.pairs):
        return [f"{run.name} has {len(found)} scores for {len(run.pairs)} rows"]
    findings = []
    for row, (query, passage) in enumerate(run.pairs):
        should_fail = query is None or passage is None or passage == POISON
        if should_fail:
            attempts = f"after attempt {max_retries + 1}:" if passage == POISON and not lost_data else ""
            if attempts not in found.errors.get(row, ""):
                findings.append(f"{run.name}: row {row} has no error, or another: {found.errors.get(row)}")
        elif row in found.errors:
            findings.append(f"{run.name}: row {row} failed: {found.errors[row]}")
        elif not math.isclose(float(found[row]), score_of(query or "", passage or ""), abs_tol=1e-6):
            findings.append(f"{run.name}: row {row} has a score that is not its own")
    return findings[:3]
