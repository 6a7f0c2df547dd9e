"""What must be true of a simulated cluster; each finding is a sentence, none if all is well."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from rankmill.jobs.contract.errors import RankmillError, RunCancelled, RunExpired, RunFailed
from rankmill.jobs.contract.priority import group_of
from tests.simulation.cluster import MACHINES, NO_MODEL, POISON, REQUEST_ROWS, Submitted, first_token, told_by
from tests.simulation.history import History
from tests.simulation.world import World


def computed_again(world: World, runs: Sequence[Submitted]) -> list[str]:
    """Whether pairs were computed more often than they were submitted, though nothing went wrong."""
    pairs = [(*pair, run.of_texts) for run in runs for pair in run.pairs]
    if any(passage == POISON for _, passage, _ in pairs):
        return []
    asked = Counter(
        first_token("" if alone else query or "", passage)
        for query, passage, alone in pairs
        if passage and (query or alone)
    )
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
        if name in world.history.notes and item.expireat is not None:
            continue  # likewise
        is_left = name.startswith("rankmill:run:") and not any(run in name for run in detached)
        if is_left and not lost_data:
            found.append(f"{name} is left")
        elif name.startswith(("rankmill:", "rq:job:", "rq:execution:")) and item.expireat is None:
            found.append(f"{name} does not expire")
    return found[:5]


def miscounted(world: World, used: Iterable[tuple[str, int, int]]) -> list[str]:
    """What is wrong with the accounts, if runs of these tenants have used at least and at most so much."""
    counted: Counter[str] = Counter()
    for key, item in world.redis.fake.dbs[0]._dict.items():
        if key.startswith(b"rankmill:usage:"):
            for name, amounts in item.value.items():
                if b"|" in name and not name.startswith(b"name|"):
                    rows = [int(each) for each in amounts.split()]
                    counted[name.decode().partition("|")[0]] += rows[0] + rows[3] + rows[4]
    least, most = Counter[str](), Counter[str]()
    for tenant, fewest, highest in used:
        least[group_of(tenant)] += fewest
        most[group_of(tenant)] += highest
    return [
        f"accounts: {counted[group]} rows of {group} are counted, {least[group]} to {most[group]} were used"
        for group in sorted({*counted, *most})
        if not least[group] <= counted[group] <= most[group]
    ]


def crashes(world: World) -> list[str]:
    found = []
    for _, thread, error in world.crashes:
        at = error.__traceback__
        while at and at.tb_next:
            at = at.tb_next
        where = f"{at.tb_frame.f_code.co_filename.rpartition('/')[2]}:{at.tb_lineno}" if at else "?"
        found.append(f"{thread} ended with {type(error).__name__}: {error} ({where})")
    return found


def wrong(
    run: Submitted, found: Any, history: History, *, lost_data: bool, may_be_wrong: bool = False
) -> list[str]:
    """What is wrong with a run's scores; they `may_be_wrong` if nobody has told that a device was broken."""
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
        should_fail = (query is None and not run.of_texts) or passage is None or passage == POISON
        if should_fail:
            attempts = (
                f"after attempt {history.max_retries + 1}:" if passage == POISON and not lost_data else ""
            )
            if attempts not in found.errors.get(row, ""):
                findings.append(f"{run.name}: row {row} has no error, or another: {found.errors.get(row)}")
        elif row in found.errors and history.may_be_lost(row, found.errors[row]):
            continue
        elif row in found.errors:
            findings.append(f"{run.name}: row {row} failed: {found.errors[row]}")
        elif why := wrong_score(run, row, float(found[row]), may_be_wrong=may_be_wrong):
            findings.append(why)
    size = REQUEST_ROWS if run.kind == "requests" else len(run.pairs)
    for first in range(0, len(run.pairs), size):
        rows = [row for row in range(first, min(first + size, len(run.pairs))) if row not in found.errors]
        findings += mixed(run, ((row, float(found[row])) for row in rows))
    return findings[:3]


def wrong_score(run: Submitted, row: int, score: float, *, may_be_wrong: bool) -> str | None:
    """What is wrong with the score of a row."""
    told = told_by(score, *run.texts(row))
    if told is None:
        return f"{run.name}: row {row} has a score that is not its own"
    if told.broken and not may_be_wrong:
        return f"{run.name}: row {row} has the score of a broken device, which its worker has reported"
    return None


def mixed(run: Submitted, scores: Iterable[tuple[int, float]]) -> list[str]:
    """Whether rows of one run are scored in several precisions, by several models, or with several bits."""
    told = {told_by(score, *run.texts(row)) for row, score in scores}
    machines = {MACHINES[each.place] for each in told if each}
    how = machines if run.deterministic else {(each.precision, each.content) for each in machines}
    return [f"{run.name} is scored by {' and '.join(sorted(map(str, how)))}"] if len(how) > 1 else []
