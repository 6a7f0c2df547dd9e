"""Failures that the simulation has found in the product, as small as they could be made; they are mended.

The newest are last. Breaks of the product found some, as seeds have their like too rarely.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from rankmill.jobs.contract.priority import Priority, Tenant
from tests.simulation.cluster import POISON, Pair, Submitted
from tests.simulation.faults import Fault
from tests.simulation.scenario import THEMES, Scenario, outage, suspects


@dataclass(frozen=True)
class Kept:
    """A failure: its symptom, the commit that mended it, and what shows it.

    ``mended`` may be unknown; a break of the product was never in it.
    """

    symptom: str
    mended: str
    scenario: Scenario


def _pairs(rows: int) -> tuple[Pair, ...]:
    return tuple(("query", f"passage {row}") for row in range(rows))


_POISON = (("query", POISON),)
_POISON_LAST = (*_pairs(6), *_POISON)


def _run(
    pairs: int | tuple[Pair, ...], at: float, kind: str, priority: Priority | None = None, **how: Any
) -> Submitted:
    return Submitted("", _pairs(pairs) if isinstance(pairs, int) else pairs, at, kind, priority, **how)


def _kept(symptom: str, mended: str, *parts: Submitted | Fault, **how: Any) -> Kept:
    """A failure of a scenario with these runs and faults."""
    runs = [each for each in parts if isinstance(each, Submitted)]
    named = tuple(replace(each, name=f"run-{number}") for number, each in enumerate(runs))
    faults = tuple(each for each in parts if isinstance(each, Fault))
    return Kept(symptom, mended, Scenario(named, faults, **how))


def _lost_replies(*faults: Fault) -> Scenario:
    """A row that kills its workers, and replies are lost."""
    return Scenario(
        workers=(0.01, 0.01),
        runs=(Submitted("run-0", _POISON, 1.0, "live", "bulk"),),
        faults=faults,
        chunk_size=4,
    )


def _cut_off(fault: Fault, *, workers: int, loads: int) -> Scenario:
    """A worker is cut off between a command and its reply, while attempts fail, as so many loads do."""
    return Scenario(
        seed=3,
        workers=(0.05,) * workers,
        runs=(Submitted("run-0", _pairs(1), 1.0, "live", "bulk"),),
        faults=(fault,),
        chunk_size=4,
        stumbles=loads,
    )


def _stands_still(kind: str, *, at_write: str, successor_at: str = "mkdir") -> Scenario:
    """A runner stands still at a write, and loses its run; its successor stands still at one of its writes.

    When the first goes on the server is away, so that nobody tells it.
    """
    return Scenario(
        workers=(0.01,),
        runs=(Submitted("run-0", _pairs(3), 1.0, kind),),
        faults=(
            Fault(0.5, "stop_at_write", 20.0, target=at_write),
            Fault(15.0, "stop_at_write", 20.0, target=successor_at),
            Fault(21.0, "restart", 20.0, 0),
        ),
        runners=(0.0, 0.0),
    )


_PUT_BACK, _SENT, _BEGUN = "status queued", "UNLINK rq:job:", "status started"
"""Parts of the commands that put a job into the queue, send a chunk, and begin a job."""

_AS_FOUND = Scenario.drawn(8002245, themed=False)

KEPT = (
    _kept("A server that was away for more than a minute: the run then ended with NoWorkers, as the time "
          "in which nobody could look at the workers counted as time without workers. The worker goes on "
          "when the producer has looked.",
          "d1531ee2", _run(200, 1.0, "live"), Fault(4.9, "stop", 73.0), Fault(5.0, "restart", 70.0),
          seed=4),
    _kept("A worker whose host's clock is hours ahead dies: its lease ended by its own clock, hours later.",
          "0d1bd6c6", _run(200, 1.0, "live"), Fault(4.0, "kill"), Fault(4.1, "kill", 0.0, 1), seed=16,
          workers=(0.05, 0.05), clocks=(3600.0, 0.0)),
    _kept("A chunk kills the workers that take it, and the clock of the host that tries it again is behind "
          "the one that paused it: the pause lasted for as long as the clocks differ.",
          "0d1bd6c6", _run(_POISON_LAST, 8.9, "detached"), Fault(14.5, "jump", 45.0, 2),
          Fault(60.0, "jump", 0.0, 3), Fault(90.0, "jump", 45.0, 4), seed=60, workers=(0.01,),
          chunk_size=4),
    _kept("A row kills its worker again and again. A cleaning puts its job back and sees it on its way to "
          "the next worker; the cleaning of the next time took that for one long stay and put it back "
          "again, so that two workers had it at once, and the job had an attempt more than are allowed.",
          "unknown", _run(_POISON, 1.0, "live", "bulk"), seed=7, workers=(0.01, 0.01, 0.01), chunk_size=4),
    _kept("The server comes back on a host whose clock is behind: the leases of the dead lasted for as "
          "long as the clocks differ, and so did the lock of whoever cleaned the queue before.",
          "d0940677", _run(_POISON, 4.17, "live"), Fault(6.28, "server_clock", 2.0, 6),
          Fault(17.03, "server_clock", 2.0, 1), seed=18, chunk_size=4),
    _kept("The server evicts the stream of results while a chunk kills its workers: that it does was lost "
          "with each attempt, so it was never split, and its good rows failed.",
          "3a7ec9a4", _run(_POISON_LAST, 1.0, "live"), Fault(3.0, "evict_any"), seed=2),
    _kept("A disk that is full when a runner begins: it was told as a fault of the input, and the run "
          "failed for all runners.",
          "unknown", _run(40, 1.0, "submitted parquet"), Fault(0.5, "fill_disk", 2.0), seed=3,
          workers=(0.01,),
          runners=(0.0,)),
    _kept("The first sync of score-file's folder fails: that was a traceback.",
          "unknown", _run(40, 1.0, "file parquet"), Fault(0.5, "fail_sync"), seed=7, workers=(0.01,)),
    _kept("The server loses its data, and the runner that puts its run back dies. Its clock is ahead, and "
          "said how long the lease lasts: the run stood still for as long as the clocks differ.",
          "unknown", _run(200, 1.1, "submitted parquet"), Fault(11.495, "flush"),
          Fault(12.5, "kill_producer", 0.0, 1), seed=8, workers=(0.1,), runners=(3600.0,)),
    _kept("A runner dies while it removes the folder of a run that is done: that stayed beside the output.",
          "40ec3fa6", _run(3, 1.0, "submitted parquet"),
          Fault(0.5, "kill_at_write", target="unlink journal.db"), workers=(0.01,), chunk_size=2,
          runners=(0.0,)),
    _kept("The same in a batch, between its scores and its answers.",
          "4e706a56", _run(3, 1.0, "batch"), Fault(0.5, "kill_at_write", target="unlink journal.db"),
          workers=(0.01,), chunk_size=2, runners=(0.0,)),
    _kept("The host's clock is 100 s ahead of the server's: the pause after a failed attempt lasted as "
          "much longer.",
          "667036fe", _run(1, 1.0, "live"), seed=141, clocks=(100.0,), chunk_size=4, stumbles=1),
    _kept("The server has lost the key of a worker, which RQ writes again in part at its next state: until "
          "the heartbeat it was told as a plain RQ worker, and whoever submitted just then was refused.",
          "460b6cc5", _run(_POISON, 8.738700557273672, "batch"),
          _run(1, 8.158108579347696, "detached", "bulk"),
          Fault(6.4020130819028385, "server_clock", 45.0, 28), seed=141, clocks=(3600.0,), chunk_size=4,
          runners=(0.0,)),
    _kept("A full disk keeps results from the journal: they were counted, and again when they were scored "
          "again.",
          "8a374169", _run(10, 6.73, "file parts"), Fault(9.79, "fill_disk", 20.0, 10), seed=600034,
          workers=(0.3,)),
    _kept("The server loses what a deterministic run is scored with, and workers with other bits settle it "
          "anew: the producer took no result of theirs, and nobody settled it again, so good rows failed "
          "(seed 800433).",
          "a1ed07ce", _run(200, 1.0, "live", deterministic=True), Fault(1.3, "roll_back", 0.1),
          workers=(0.05, 0.05), machines=(0, 2)),
    _kept("A worker says what its broken device has scored, just when the server has lost the run: the run "
          "went on, and had wrong scores.",
          "11a81bb6", _run(600, 1.0, "live"), Fault(2.0, "miscompute"), Fault(13.4, "flush"),
          workers=(0.1, 0.1)),
    _kept("The same with score-file killed meanwhile: the run before is over, and its rows stayed in the "
          "output (seed 800863).",
          "unknown", _run(600, 1.0, "file parquet"), Fault(2.0, "miscompute"), Fault(10.0, "kill_producer"),
          seed=2, workers=(0.1, 0.1)),
    _kept("A job ends while its lease is renewed, and the reply to that is lost: RQ wrote a part of the "
          "job again, without expiry, and took the repetition for a renewal (seeds 2100780 and 2100824 of "
          "an earlier time).",
          "67bcf27e", _run(200, 1.0, "live", "bulk"), Fault(3.0, "breaks"), seed=133, chunk_size=2),
    _kept("A runner dies while its run is cancelled: the next one told the cancellation, and left what the "
          "dead one had begun in Redis for a day, where workers went on with it (seeds 109, 220, 5784).",
          "9e741b40", _run(28, 5.03, "submitted cancelled"), Fault(7.35, "lose_power", 2.0, 2), seed=220,
          runners=(0.0,)),
    _kept("score-file is killed before it has a result, and finds the disk full when it is started again: "
          "it removed its folder, which named the run of before, and that stayed in Redis for a day.",
          "649997b5", _run(2, 4.8, "file jsonl"), Fault(6.0, "kill_producer"), Fault(6.5, "fill_disk", 5.0),
          seed=558, workers=(0.3,), stumbles=1),
    _kept("The host loses power after a batch is done: its folder was not synced in the folder of all "
          "files, and the answers were gone.",
          "649997b5", _run(1, 9.8, "file parquet"), _run(1, 5.03, "batch"),
          Fault(7.96, "lose_power", 0.0, 44), seed=20433, workers=(0.3,), runners=(0.0,)),
    _kept("The server's clock jumps back, and connections break before a worker trusts the leases of "
          "others: those of the dead were bounded only then, and their chunks stood still for longer than "
          "is promised.",
          "1bda9792", _run(_POISON_LAST, 6.39, "live", "bulk"), Fault(9.5, "server_clock", 2.0, 11),
          Fault(23.32, "half_open", 0.1, 47), workers=(0.01,)),
    _kept("The reply is lost with which a dead worker's job was put back: it was put back twice, ran at "
          "two places, and had an attempt more than are allowed (seed 5357).",
          "93d811fc", _run(_POISON_LAST, 1.0, "live", "bulk"), Fault(14.0, "breaks", target=_PUT_BACK),
          seed=10, workers=(0.01,), chunk_size=4),
    Kept("The same where the attempt before it had failed, or its worker died after that: what is repeated "
         "found the job on its way to a worker, and put it back (seeds 7000119, 7001323).",
         "unknown",
         _lost_replies(Fault(0.5, "breaks", 0.0, 1, _PUT_BACK), Fault(15.0, "breaks", 0.0, 1, _PUT_BACK))),
    _kept("The same with two workers: what is repeated put the job back when the other one had it. (The "
          "seed that this was made for counted the attempt twice; with the commands of today no seed that "
          "was tried does.)",
          "unknown", _run(_POISON, 1.0, "live", "bulk"), Fault(15.0, "breaks", target=_PUT_BACK), seed=9,
          workers=(0.01, 0.01), chunk_size=4),
    _kept("A runner gets SIGTERM while the server is away, and the run has no row yet: it removed the "
          "folder that names what it had begun, and that stayed in Redis for a day (seeds 20084, 5002563, "
          "7000501, 7001292).",
          "b962f886", _run(40, 1.0, "submitted cancelled"), Fault(4.2, "restart", 20.0),
          Fault(4.5, "end_runner"), workers=(0.3,), runners=(0.0,)),
    _kept("A runner dies, and its successor's disk fails, so that no runner can score the batch: what the "
          "dead one had begun stayed in Redis (seed 7000496).",
          "b962f886", _run(40, 1.0, "batch"), Fault(2.5, "kill_producer", 0.0, 1), Fault(2.6, "fail_sync"),
          workers=(0.3,), runners=(0.0,)),
    _kept("A runner dies while it removes the folder of a run that is done, and a sync fails when its "
          "successor removes the rest: that needs no sync (seed 7000660).",
          "b962f886", _run(3, 1.0, "submitted parquet"),
          Fault(0.5, "kill_at_write", target="unlink journal.db"), Fault(2.6, "fail_sync"),
          Fault(2.6, "fail_sync"), workers=(0.01,), chunk_size=2, runners=(0.0,)),
    _kept("An attempt fails at a job that the server has just lost, and the server is full then: RQ writes "
          "the new status before all the rest, and that piece of the job had no expiry (seed 9008528).",
          "db14e5da", _run(1, 1.0, "live", "bulk"), Fault(1.2, "flush", 0.1), Fault(1.3, "full", 20.0, 1),
          chunk_size=4, stumbles=1),
    Kept("The reply is lost with which a chunk was sent, and so it was in the queue twice: two workers "
         "began it, and it had an attempt more than are allowed (seed 9007718).",
         "17c9d5da", _lost_replies(Fault(0.5, "breaks", target=_SENT))),
    Kept("A runner is killed when a part is in its place, and Redis still has results of it: its successor "
         "took them for new, and counted their rows again. As it was found, but for its last fault, which "
         "comes after the end of today's run.",
         "8262774d", replace(_AS_FOUND, faults=_AS_FOUND.faults[:-1])),
    _kept("The reply is lost with which chunks were sent: they were in the queue twice. The first one "
          "killed its worker before anybody came to its copy: that attempt was not counted, and it had one "
          "more than allowed.",
          "8ace26ae", _run((("query", POISON), *_pairs(95)), 1.0, "live", "bulk"),
          Fault(0.9, "breaks", target=_SENT), workers=(0.3, 0.3), chunk_size=4,
          settings=(("claim_ahead", 8),)),
    Kept("A runner stands still just before it moves a run's output into place, and goes on when its "
         "successor has looked for that output, and does not have its lock yet: the run failed, as its "
         "output \"exists already\".",
         "b72044e6", _stands_still("submitted parquet", at_write="replace output")),
    Kept("The same with what a batch is scored to: it was scored and counted again (seed 8002972).",
         "b72044e6", _stands_still("batch", at_write="replace output")),
    Kept("The same with a batch's answers: the runner that had stood still removed what its successor was "
         "writing beside them, and then all began anew.",
         "b72044e6",
         _stands_still("batch", at_write="replace output.jsonl", successor_at="to be on disk .rankmill-")),
    Kept("A worker that has just recorded a failed attempt is cut off before the reply: it recorded it "
         "again when others had tried the job meanwhile, and that had an attempt more than are allowed.",
         "7a10be32", _cut_off(Fault(1.4, "cut_off", 20.0, target="failed_job_count"), workers=3, loads=3)),
    Kept("The same with a worker that has just begun a job, which was over when it began it again.",
         "7a10be32", _cut_off(Fault(8.6, "cut_off", 20.0, target=_BEGUN), workers=3, loads=2)),
    Kept("A worker is cut off in the middle of the transaction that moves a job: it ended, as redis-py "
         "connects again to take back what it watches.",
         "7a10be32", _cut_off(Fault(1.3, "cut_off", 45.0, target="ZSCORE rq:wip:"), workers=2, loads=2)),
    _kept("Two workers that differ each refuse the other's run, which is a request of another tenant: each "
          "took the one of the tenant that had had less, refused it, and never came to its own (seeds "
          "9101116, 9101403).",
          "unknown", *(_run(40, 1.0, "live", tenant=Tenant(name)) for name in "ab"), workers=(0.3, 0.3),
          chunk_size=4, machines=(1, 3), settings=(("claim_ahead", 4),)),
    _kept("A runner stands still, loses its run, and is interrupted when a result is in its journal, but "
          "before it knows: it deleted the run, and those rows were never counted (seed 2076).",
          "e7b6a681", _run(40, 1.0, "submitted parquet"),
          Fault(0.5, "stop_at_write", 20.0, 3, "commit journal.db"), seed=2, chunk_size=4,
          runners=(0.0, 0.0)),
    _kept("The server's clock jumps back, and the only worker dies before a heartbeat has bounded its "
          "leases: that of its successor, which knows of no jump, does so.",
          "unknown", _run(200, 1.0, "live"), Fault(3.0, "server_clock", 2.0), Fault(4.5, "kill"),
          chunk_size=4),
    _kept("A replica that lags, on a host whose clock is behind, gives new results lower numbers than "
          "those that were read and lost: who reads on where he was finds none of them.",
          "unknown", _run(200, 1.0, "detached"), Fault(4.0, "fail_over", 2.0, 3),
          settings=(("claim_ahead", 64),)),
    _kept("A worker is cut off when it has begun a job. Others fail at it meanwhile, and it pauses: that "
          "worker began it again, and wrote its own count of attempts, which lacks theirs.",
          "7a10be32", _run(_POISON, 1.0, "live", "bulk"), Fault(0.95, "cut_off", 20.0, target=_BEGUN),
          workers=(0.05, 0.05), chunk_size=4, stumbles=2),
    _kept("A server takes no writes for more than a minute, so no worker can say that it is there: the run "
          "ended with NoWorkers (seed 9600723).",
          "f75efae7", _run(40, 1.0, "live"), Fault(3.0, "no_replicas", 90.0), workers=(0.3,)),
    _kept("A runner stands still while it writes, and learns that it has lost its run as it removes its "
          "temporary folder: that stayed beside the batch's answers, which another runner had finished "
          "(seed 691).",
          "7f8daaa0", _run(3, 1.0, "batch"), Fault(0.5, "stop_at_write", 45.0, target="unlink output"),
          runners=(0.0, 0.0)),
    _kept("A chunk whose worker has died waits, to be scored alone, for the others of its next worker, and "
          "a row of these kills that: this was a failed attempt at it, so it was given up early. It has one "
          "row: a larger one would be cut in the end, and its pieces scored (as seed 9801909 had it).",
          "c2ea0bb8", _run(1, 1.0, "live", "bulk"), _run((*_pairs(15), *_POISON), 17.0, "live", "bulk"),
          Fault(1.6, "kill"), seed=6, workers=(0.3,), settings=(("max_retries", 1),)),
    _kept("A worker that has stood still trusts no lease for a while, and has its heartbeats just before "
          "another's: if it kept the lock of the cleaning, nobody would take what a dead worker had. A "
          "break found this.",
          "unknown", _run(200, 1.0, "live"), Fault(2.0, "stop", 11.6, 1), Fault(3.0, "kill", 40.0),
          workers=(0.3, 0.3, 0.3), chunk_size=4, settings=(("claim_ahead", 4),)),
    _kept("The server evicts the record of a submitted run that waits, and its runner reads the job "
          "instead.",
          "unknown", _run(3, 1.0, "submitted parquet"), Fault(0.5, "stop_producer", 5.0, 1),
          Fault(2.0, "evict_any", target="rankmill:file-run:"), workers=(0.01,), runners=(0.0,)),
    _kept("A worker is cut off while RQ ends a job by name, and watches what depends on it: it ended, as "
          "redis-py connects again to take that back (seed 21211).",
          "00bc6a54", _run(3, 1.0, "by name"), Fault(0.5, "cut_off", 45.0, target="SMEMBERS rq:job:")),
    _kept("score-file is killed while it removes the folder of an output that is in its place, and again "
          "before it puts the next one there: it forgot the first, and said that it exists already (seed "
          "3798). A break found that a row without a score counts once all the same.",
          "d40f406b", _run((*_pairs(2), (None, "passage")), 1.0, "file jsonl"),
          Fault(0.5, "kill_at_write", target="unlink journal.db"),
          Fault(0.5, "kill_at_write", 0.0, 1, "replace output"), workers=(0.01,)),
    _kept("The server evicts what a run is scored with, and another worker settles it anew with its own "
          "precision: the producer takes none of its results, and says again what it was. A break found "
          "this.",
          "unknown", _run(200, 1.0, "live", "bulk"), Fault(3.5, "evict_any", target=":settled"),
          workers=(0.05, 0.05), machines=(0, 1),
          settings=(("claim_ahead", 64), ("token_budget", 128))),
    *(_kept("A runner stands still when it has put the output in its place. Its successor ends the run, "
            "and cannot remove the folder that the first has: it stayed beside the output, as the first "
            "learns then that the run is lost, and leaves all as it is (seed 7764). The same with the "
            "scores of a batch, whose answers its successor writes (seed 4221).",
            "9aed6e7a", _run(3, 1.0, kind),
            Fault(0.5, "stop_at_write", 45.0, target="replace is done output"), workers=(0.01,),
            runners=(0.0, 0.0)) for kind in ("submitted parts", "batch")),
    _kept("A runner is killed while it removes the folder of an output that is in its place, and so is the "
          "next one as it begins to: the run must not have ended before. A break found this.",
          "a break", _run(3, 1.0, "submitted parquet"), Fault(0.5, "kill_at_write",
          target="unlink journal.db"),
          Fault(0.5, "kill_at_write", 0.0, 2, "mkdir out.parquet.rankmill"), workers=(0.01,),
          runners=(0.0, 0.0)),
    _kept("score-file is killed, and again while it deletes the run of the first from Redis: the next one "
          "did not find that run any more, and its pairs stayed for a day (seed 12048).",
          "4a4294a7", _run(40, 1.0, "file parquet"),
          Fault(0.5, "cut_off", 45.0, target="ZREM rankmill:runs"), Fault(3.0, "kill_producer"),
          Fault(10.0, "kill_producer"), workers=(0.1,), chunk_size=4),
    Kept("A worker that no longer listened to the bell heard a request's ring, and had no room for it: "
         "another, which had, came to the request when it looked, up to a second later.",
         "77cd716a", THEMES["calls"](Scenario.drawn(371, themed=False), random.Random("theme 371"))),
    Kept("The server is away for longer than a lease: live workers keep their chunks. A break found this.",
         "a break", outage(Scenario.drawn(13, themed=False), random.Random("theme 13"))),
    Kept("Rows that kill their worker, among chunks that cannot be split: each must be alone when tried "
         "again. A break found this.",
         "a break", suspects(Scenario.drawn(14, themed=False), random.Random("theme 14"))),
    _kept("A chunk fails three times and then not. That its attempt has failed must be told before its job "
          "is put back, which counts the attempt. A break found this.",
          "a break", _run(3, 1.0, "live", "bulk"), seed=3, workers=(0.05,), chunk_size=4, stumbles=3),
    _kept("A request of two chunks rang once, and who heard it had room for one of them.", "405ea39d",
          _run(120, 1.0, "detached", "bulk"), *(_run(40, 5.0, "requests") for _ in "ab"),
          seed=4, workers=(0.1, 0.3), chunk_size=4, settings=(("claim_ahead", 8), ("token_budget", 128))),
    Kept("A job by name was enqueued with the id of another one, while a worker ended that one: it got the "
         "scores of the other's pairs.",
         "4568551c", THEMES["enqueued_again"](Scenario.drawn(39, themed=False), random.Random("theme 39"))),
    _kept("RQ's own code put back the chunks of dead workers while somebody looked at RQ's registries, and "
          "nobody noted which chunk kills: good rows beside that row failed.",
          "7736759c", _run((*_pairs(20), *_POISON, *_pairs(19)), 1.0, "live"), Fault(0.5, "rq_info", 150.0),
          seed=2, workers=(0.05, 0.05), chunk_size=4),
    _kept("The same with a submitted run of a dead runner: RQ dropped it, and no runner took it any more.",
          "7736759c", _run(200, 1.0, "submitted parquet"), Fault(0.5, "rq_info", 30.0),
          Fault(3.8, "kill_producer", 0.0, 1), workers=(0.05,), runners=(0.0,)),
)  # fmt: skip

FOUND = tuple(each.scenario for each in KEPT)
