"""Small breaks of the product, each of which the simulation, or the test that a break names, must find.

``python -m tests.simulation.mutants`` breaks one after the other, two at a time, and prints what was said of
each. One that is not found is a hole in a promise, or code that nothing needs. Each break is looked for among
the first seeds, as ``make simulate`` plays them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click

from tests.simulation.promises import (
    AttemptsAreCounted,
    BulkIsNotStarved,
    CancelledIsNotScored,
    DeadRunnersRunIsTaken,
    DeadWorkersChunkIsTaken,
    DrainedTakesNothing,
    EveryRowOnce,
    HalvesAreSent,
    LostReplyLosesNoChunk,
    NothingIsComputedTwice,
    NothingIsLeft,
    NothingIsLeftBeside,
    NoWorkerIsIdle,
    OneWorkerHasAChunk,
    Promise,
    RequestsAreHeard,
    RequestsComeFirst,
    ResultIsInJournal,
    TenantsGetTheirShare,
    UsageIsCounted,
    WaitingIsCounted,
    WindowIsKept,
    WorkersEndAsTold,
    WorkGoesOn,
    WrongScoresAreTold,
)

ROOT = Path(__file__).resolve().parents[2]

_CHUNKS, _CLAIMS, _COLLECTOR, _DRIVER, _LIVE = (
    "workers/queue/chunks.py", "workers/queue/claims.py", "producer/collect/collector.py",
    "producer/collect/driver.py", "producer/collect/live.py",
)  # fmt: skip
_HEARTBEAT, _ORDER, _RECOVERY, _RUNS = (
    "workers/queue/heartbeat.py", "workers/queue/claim_order.py", "jobs/protocol/recovery.py",
    "jobs/protocol/runs.py",
)  # fmt: skip
_JOB, _WORKER = "workers/rq/job.py", "workers/rq/worker.py"
_BEGIN = "workers/rq/lua/begin.lua"
_TAKE, _WAITING = "jobs/protocol/lua/take.lua", "jobs/protocol/lua/waiting.lua"
_QUEUE = "jobs/protocol/ordered_queue.py"


@dataclass(frozen=True)
class Mutant:
    """A break: in `file`, `right` becomes `wrong`.

    One that is `kept` brings back a failure of `found.py`, and is looked for there: seeds have it rarely.
    A `test` finds what scenarios show seldom or never: workers refuse the same runs only for a moment.
    """

    name: str
    file: str
    right: str
    wrong: str
    kept: bool = False
    test: str = ""


_LISTS = "tests/jobs/test_waiting_lists.py::test_"
_STORE = "tests/jobs/test_runs.py::test_"
_REFUSALS = "tests/faults/test_refusals.py::test_"
_BY_NAME = "tests/workers/queue/test_score_pairs.py::test_"
_ALONE = f"{_LISTS}runs_that_a_worker_leaves_alone_are_no_obstacle"

BREAKS: dict[type[Promise], tuple[Mutant, ...]] = {
    EveryRowOnce: (
        Mutant("a chunk that waits to be scored alone is blamed for another's row", _CLAIMS,
               "            if suspect := is_suspect(job):\n                self._pipeline.drain()\n"
               "            held = self._worker.claim(job, queue)\n",
               "            held = self._worker.claim(job, queue)\n"
               "            if suspect := is_suspect(job):\n                self._pipeline.drain()\n",
               kept=True),
        Mutant("a chunk whose worker has died is not scored alone", _RECOVERY,
               "        if died:\n            suspect(job)\n", "", kept=True),
        Mutant("a half lacks a row", _COLLECTOR,
               "(middle, len(self.table) - middle))", "(middle, len(self.table) - middle - 1))"),
        Mutant("halves are joined in the order of their results", _COLLECTOR,
               "ordered = sorted(chunk.results, key=lambda answer: answer[0].start)",
               "ordered = chunk.results"),
        Mutant("a result is accepted twice", _COLLECTOR,
               "piece = self.pieces.pop(result.chunk, None)", "piece = self.pieces.get(result.chunk)"),
        Mutant("a run that has begun ends when its worker is not seen", "jobs/protocol/refusals.py",
               "now - since < self._lease_seconds and self._has_begun(run_id)", "False"),
        Mutant("what all refused long ago counts", "jobs/protocol/refusals.py",
               "since = min(since, now) if now - last < self._lease_seconds + _SERIES_SECONDS else now",
               "since = min(since, now)",
               test=f"{_REFUSALS}a_run_that_has_begun_ends_when_all_refuse_it_for_a_lease"),
        Mutant("an outage counts as time without workers", "producer/collect/presence.py",
               "if unseen > _WORD_SECONDS:", "if unseen > 1e9:", kept=True),
        Mutant("a time without writes counts as time without workers", "producer/collect/presence.py",
               "elif refusal:", "elif False:", kept=True),
        Mutant("a producer does not see that its run is cancelled", _DRIVER,
               "if self._store.was_cancelled(self.run):", "if self.run is None:"),
        Mutant("nobody is told of a cancellation", "jobs/protocol/lua/cancel.lua",
               "redis.call('SET', KEYS[1], 1, 'EX', ARGV[1])\n", ""),
        Mutant("a row's error goes to its neighbour", _CHUNKS,
               "errors[list(scored.errors)] =", "errors[[row - 1 for row in scored.errors]] ="),
        Mutant("scores go to other rows", "workers/engine/engine.py",
               "mine, out, places = scores[done : done + len(rows)], work.scored, work.rows[rows]",
               "mine, out, places = scores[done : done + len(rows)], work.scored, work.rows[rows][::-1]"),
        Mutant("what a run is scored with is not settled again", _LIVE,
               "            self.store.settle(self.run, settled, over=True)\n", "            pass\n",
               kept=True),
        Mutant("a worker keeps what was settled first", _CHUNKS,
               "            self._settled.pop(run.id, None)\n", "            pass\n", kept=True),
        Mutant("a result in another precision is taken", _COLLECTOR,
               "        if mine.precision != self.settled.precision:", "        if False:", kept=True),
        Mutant("a worker scores in its own precision", _CHUNKS,
               "        if settled != mine:\n            try", "        if False:\n            try"),
        Mutant("what another runner has made meanwhile is made again", "producer/files/workspace.py",
               "                if self._made():\n", "                if False:\n", kept=True),
        Mutant("a runner that stood still removes what its successor writes", "extensions/runners/work.py",
               "        note(now=True)", "        note()", kept=True),
        Mutant("an output that was put in place is forgotten for the next one", "producer/collect/journal.py",
               '"\\n".join([*self.sealed, output])', "output", kept=True),
        Mutant("a batch's folder is not synced", "extensions/batches/folder.py",
               "            sync(self._local)  #",
               "            pass  #", kept=True),
    ),
    ResultIsInJournal: (
        Mutant("a result is deleted before it is collected", _DRIVER,
               "        accepted = self._accept(entries)\n"
               "        self._kept.forget([entry for entry, _ in entries], self.collector)\n",
               "        self._kept.forget([entry for entry, _ in entries], self.collector)\n"
               "        accepted = self._accept(entries)\n"),
        Mutant("the journal is written meanwhile", _LIVE,
               "            self.journal.add(results, account)\n",
               "            system.Thread(target=lambda: self.journal.add(results, account)).start()\n"),
        Mutant("the journal is not synced", "producer/collect/journal.py",
               "PRAGMA synchronous = FULL;",
               "PRAGMA synchronous = NORMAL;"),
    ),
    NothingIsComputedTwice: (
        Mutant("a lease is not renewed", _WORKER,
               "self.maintain_heartbeats(execution.job, execution)", "pass"),
    ),
    UsageIsCounted: (
        Mutant("what is repeated counts again", "jobs/protocol/lua/count.lua",
               "counts = redis.call(ARGV[1], KEYS[1], entry) == 1",
               "counts = redis.call(ARGV[1], KEYS[1], entry) >= 0"),
        Mutant("what a full disk keeps from the journal is counted", _LIVE,
               "used = self.journal.account.used", "pass", kept=True),
        Mutant("what a dead producer has in its journal is not counted", "score/score_file.py",
               "used={**account.used, **rest}", "used=rest"),
        Mutant("what no device has scored counts with each run", _LIVE,
               "        if account.rest:", "        if account.rest and not self.run:", kept=True),
        Mutant("what has failed is counted as cached", _COLLECTOR,
               "cached=max(self.cut - self.scored - failed, 0)", "cached=max(self.cut - self.scored, 0)"),
    ),
    WrongScoresAreTold: (
        Mutant("nobody looks for a note that scores are wrong", _DRIVER,
               "        if why := self._store.wrong(self._kept.made_by):", "        if why := None:"),
        Mutant("the end of a run deletes the note that its scores are wrong", _RUNS,
               "            pipe.get(keys.wrong(run.id))\n",
               "            pipe.getdel(keys.wrong(run.id))\n",
               test=f"{_STORE}a_note_that_scores_are_wrong_outlives_its_run"),
        Mutant("a worker keeps to itself what its broken device has scored", "workers/queue/claims.py",
               "        self._store.leave_notes({run: ttl for run, ttl in runs.items() if ttl}, why)\n",
               ""),
    ),
    OneWorkerHasAChunk: (
        Mutant("a chunk that an idle worker was to get is dropped", _TAKE,
               "    push(id, true)\n", ""),
        Mutant("a job that has ended keeps its lease", _JOB,
               "            worker.cleanup_execution(job, pipe, self._execution)\n            pipe.delete",
               "            pipe.delete"),
        Mutant("leases that lapsed in an outage are taken at once", "jobs/protocol/leases.py",
               "now - self._last > 2 * self._beat or abs", "abs", kept=True),
        Mutant("a job that leaves the queue anew is put back at once", "jobs/protocol/lua/rescue.lua",
               "  redis.call('DEL', seen)\n", "",
               test=f"{_LISTS}a_job_that_reached_no_worker_is_put_back_and_wakes_one"),
        Mutant("a job is moved twice", "jobs/protocol/leases.py",
               "                if end is None or end > until:\n",
               "                if False:\n", kept=True),
        Mutant("a job that is in the queue twice is begun twice", _BEGIN,
               "  if execution ~= ARGV[1] and redis", "  if false and redis", kept=True),
        Mutant("a job is begun by who has read it before another attempt", _BEGIN,
               " or (job[2] or '') ~= ARGV[3]", "", kept=True),
        Mutant("a job that is over is begun", _BEGIN,
               "if not job[1] or over[job[1]] or (job[2] or '') ~= ARGV[3] then return 0 end",
               "", kept=True),
        Mutant("a job by name that has its result is begun", _BEGIN,
               " finished = true,", "",
               test=f"{_BY_NAME}a_job_that_is_in_the_queue_twice_is_scored_once"),
    ),
    AttemptsAreCounted: (
        Mutant("an attempt is not counted", _RECOVERY,
               "job.retry(queue, pipe)",
               "job.retries_left = (job.retries_left or 0) + 1; job.retry(queue, pipe)"),
        Mutant("an attempt is counted twice", _RECOVERY,
               "job.retry(queue, pipe)",
               "job.retries_left = max((job.retries_left or 0) - 1, 1); job.retry(queue, pipe)"),
        Mutant("a failed attempt is forgotten with its job", _RECOVERY,
               "            store.count_attempts(run, {chunk: attempts})\n", "",
               test=f"{_STORE}an_attempt_that_a_worker_fails_counts_if_the_chunk_is_sent_anew"),
        Mutant("a job that a heartbeat touches is not handed back", "jobs/protocol/leases.py",
               "            except redis.WatchError:\n                pass\n",
               "            except redis.WatchError:\n                return False\n",
               test="tests/jobs/test_leases.py::test_a_job_is_moved_though_a_heartbeat_comes_meanwhile"),
        Mutant("a failed attempt is recorded twice", _JOB,
               "        self._move(end)\n",
               "        pipe = worker.connection.pipeline()\n        end(pipe)\n        pipe.execute()\n",
               kept=True),
        Mutant("an attempt at a job that was sent again is not counted", _RECOVERY,
               "in {JobStatus.STARTED, JobStatus.QUEUED}", "in {JobStatus.STARTED}", kept=True),
    ),
    DeadWorkersChunkIsTaken: (
        Mutant("a lease ends by the host's clock", _JOB,
               "hold(pipeline, self.key, execution.composite_key, ttl + RQ_DELAY, only_renew=xx)",
               "super().add_execution(execution, pipeline, ttl + RQ_DELAY, xx)"),
        Mutant("a lease lasts ten times as long", _WORKER,
               "        return self.lease_seconds\n", "        return 10 * self.lease_seconds\n"),
        Mutant("a dead worker's jobs stay with it", _RECOVERY,
               "_guarded(partial(hand_on_abandoned, queue, handle, until=now, seconds=seconds / 4))", "pass"),
        Mutant("the lock of a cleaner lasts too long", _HEARTBEAT,
               "int(seconds * 800)", "20 * int(seconds * 1000)"),
        Mutant("who trusts no lease keeps the lock", _HEARTBEAT,
               "worker.connection.delete(queue.registry_cleaning_key)", "pass", kept=True),
        Mutant("leases of a clock that was ahead stay", _RECOVERY,
               "_guarded(partial(bound_leases, queue.connection, queue.started_job_registry.key, seconds))",
               "pass", kept=True),
    ),
    LostReplyLosesNoChunk: (
        Mutant("a job whose reply was lost is not rescued", _RECOVERY,
               "_guarded(partial(rescue_unbegun, queue, seconds, now))", "pass"),
    ),
    WaitingIsCounted: (
        Mutant("what is taken still counts as waiting", _TAKE,
               "  if run_of(found) then more(-1) end\n", ""),
        Mutant("the count of what waits is not corrected", "jobs/protocol/lua/count_waiting.lua",
               "redis.call('SET', base .. 'waits', waits, 'EX', 86400)\n", ""),
    ),
    DeadRunnersRunIsTaken: (
        Mutant("a dead runner's run stays with it for another lease",
               "extensions/runners/lua/recover.lua",
               "now + ARGV[4]}", "now + ARGV[4] - 15}"),
        Mutant("RQ's own code takes leases that have lapsed", "jobs/protocol/leases.py",
               "RQ_DELAY = 365 * 86400", "RQ_DELAY = 0", kept=True),
    ),
    HalvesAreSent: (
        Mutant("a failure does not say that the worker died", _RECOVERY,
               "worker=worker, died=died", "worker=worker, died=False"),
        Mutant("a chunk that kills its worker is not split", _COLLECTOR,
               "and result.died and len(piece.table) > 1", "and result.died and len(piece.table) > 1_000"),
        Mutant("halves are not sent", _DRIVER,
               "self._retry({piece: reasons.get(piece, \"it was lost\") for piece in missing}, failed)",
               "self._retry({each: \"it was lost\" for each in missing if isinstance(each, int)}, failed)"),
    ),
    RequestsAreHeard: (
        Mutant("the bell is not rung", _WAITING,
               "if scopes[1][1] == 'request' then", "if false then"),
        Mutant("the bell is silent while requests wait", _WAITING,
               "    redis.call('LTRIM', base .. 'bell', 0, 63)\n",
               "    redis.call('LTRIM', base .. 'bell', 1, 63)\n"),
        Mutant("who hears a ring that is for others keeps it", "workers/queue/intake.py",
               "                        self._pass_on(ring[0])\n", "                        pass\n",
               kept=True),
        Mutant("a request rings once for all its chunks", _WAITING,
               "    redis.call('LPUSH', base .. 'bell', 1)\n",
               "    if redis.call('LLEN', list) == 1 then redis.call('LPUSH', base .. 'bell', 1) end\n",
               test=f"{_LISTS}a_request_rings_for_workers_that_are_full_of_bulk_work"),
        Mutant("a worker that waits is not called", _WAITING,
               "while list ~= rq and lacking > 0 do", "while false do"),
    ),
    RequestsComeFirst: (
        Mutant("a worker takes bulk work first", "jobs/protocol/lua/take.lua",
               "string.gmatch(ARGV[1], '%a+')",
               "string.gmatch('bulk request', '%a+')"),
        Mutant("bulk work comes before requests", _ORDER,
               "priorities.insert(0 if self._turns.bulk_is_next else len(priorities), \"bulk\")",
               "priorities.insert(0, \"bulk\")"),
    ),
    BulkIsNotStarved: (
        Mutant("bulk work is starved", _ORDER,
               "priorities.insert(0 if self._turns.bulk_is_next else len(priorities), \"bulk\")",
               "priorities.append(\"bulk\")"),
        Mutant("requests never have had enough", "workers/engine/pipeline.py",
               "        return self._ahead > 0\n", "        return False\n"),
    ),
    TenantsGetTheirShare: (
        Mutant("weights are ignored", _WAITING,
               "rows / (weight > 0 and weight or 1)",
               "rows"),
        Mutant("who sends more has had nothing", _WAITING,
               "'NX', level(scope[1])", "level(scope[1])",
               test=f"{_LISTS}who_sends_a_chunk_at_a_time_gets_no_more"),
        Mutant("the run that had most is next", _TAKE,
               "redis.call('ZRANGE', turns, skipped, skipped, 'WITHSCORES')",
               "redis.call('ZREVRANGE', turns, skipped, skipped, 'WITHSCORES')"),
        Mutant("the level of turns is not raised", _WAITING,
               "  had = math.max(had, level(scope))  -- an", "  -- an", test=_ALONE),
        Mutant("a chunk that is handed back has had its turn", "jobs/protocol/lua/put.lua",
               "  if ARGV[2] == '1' then give_back(ARGV[at]) end\n", "",
               test=f"{_LISTS}a_chunk_that_is_handed_back_is_next_and_costs_no_turn"),
        Mutant("turns are not counted", _TAKE,
               "      charge(scope, name, tonumber(had), costs[string.find(scope, ':') and 2 or 1])\n", ""),
    ),
    WindowIsKept: (
        Mutant("the window has no bound", "producer/collect/sizing.py",
               "        return enough or load.payload >= self._payload_bytes", "        return False"),
    ),
    WorkGoesOn: (
        Mutant("a list whose turn is lost waits for ever", "jobs/protocol/lua/put_back.lua",
               "  enter(ARGV[1])\n", ""),
        Mutant("a list that is lost is not put back", "jobs/protocol/lua/put_back.lua",
               "    push(id, false)\n",
               ""),
        Mutant("what is sent takes no part in the turns", _WAITING,
               "  if list ~= rq then more(1) end\n  enter(id)\n",
               "  if list ~= rq then more(1) end\n"),
        Mutant("a run with a short expiry shortens its list's", _WAITING,
               "  if redis.call('TTL', key) < seconds then redis.call('EXPIRE', key, seconds) end\n",
               "  redis.call('EXPIRE', key, seconds)\n",
               test=f"{_LISTS}every_key_of_a_queue_expires_and_none_before_the_jobs"),
        Mutant("a run that one worker leaves alone loses its turn", _TAKE,
               "    if waits then skipped = skipped + 1 else redis",
               "    if false then skipped = skipped + 1 else redis"),
        Mutant("nobody looks behind a run that is left alone", _TAKE,
               "    if waits then skipped = skipped + 1 else redis",
               "    if waits then return else redis", test=_ALONE),
        Mutant("of requests only the first is looked at", _TAKE,
               "  local ids = redis.call('LRANGE', list, 0, 63)\n",
               "  local ids = redis.call('LRANGE', list, 0, 0)\n", test=_ALONE),
        Mutant("a worker does not leave a run alone that it refuses", _TAKE,
               "    if alone[run] then return nil, redis.call('EXISTS', list) == 1 end\n",
               "", test=_ALONE),
        Mutant("a paused job stays paused", _RECOVERY,
               "_guarded(partial(enqueue_due, queue, now))", "pass"),
        Mutant("a job that is given up has no result", _RECOVERY,
               "        store.write_result(run, failure)\n", ""),
        Mutant("an answered chunk stays in the window", _COLLECTOR,
               "            self._leave(piece)\n            self.answered", "            self.answered"),
        Mutant("lost chunks are not sent again", _DRIVER,
               "self._retry({piece: reasons.get(piece, \"it was lost\") for piece in missing}, failed)",
               "pass"),
        Mutant("a run that was lost is not stored again", _LIVE,
               "        self.store.restore(self.run)\n", ""),
        Mutant("the stream is read on where it was", _DRIVER,
               "        self._kept.look_back()\n", "", kept=True),
        Mutant("unread results are deleted", _RUNS,
               "pipe.xdel(keys.results(run.id), *entries)", "pipe.xtrim(keys.results(run.id), maxlen=0)"),
        Mutant("a job ends without a result", _CHUNKS,
               "                self.store.add_result(pipe, self.run_id, result, self.job.run_ttl)\n",
               "                pass\n"),
        Mutant("a worker's refusal is not recorded", "jobs/protocol/refusals.py",
               '            pipe.hset(key, self._worker, f"{now + seconds:.3f} {reason}")\n', ""),
        Mutant("a run's chunk that is put back gets lost", _QUEUE,
               "        _PUT.run(client, self._places, int(front), int(at_front), job_id)\n",
               "        if not at_front:\n            _PUT.run(client, self._places, int(front), 0, job_id)\n"
        ),
        Mutant("what an idle worker was to get stays there", _TAKE,
               "= true end\nbring_strays()\n", "= true end\n"),
    ),
    NoWorkerIsIdle: (
        Mutant("a worker that is not idle keeps its place", "jobs/protocol/lua/take.lua",
               "  if found or ARGV[2 + at] ~= '1' then redis.call('ZREM', key, ARGV[2])\n",
               "  if false then\n"),
        Mutant("a worker refuses for ever", "workers/queue/claim_order.py",
               "return refused.reason if refused and system.monotonic() < refused.until else None",
               "return refused.reason if refused else None"),
    ),
    CancelledIsNotScored: (
        Mutant("a worker goes on with a cancelled run", _CLAIMS,
               "if claim.work and not claim.is_wanted():", "if claim.work and claim.run is None:"),
    ),
    DrainedTakesNothing: (
        Mutant("a drained worker takes jobs", "workers/queue/orders.py",
               "            self.drained = True\n            with", "            with"),
    ),
    WorkersEndAsTold: (
        Mutant("claims are not handed back on SIGTERM", "workers/worker.py",
               "            self._claims.hand_back_all()\n", "            pass\n"),
        Mutant("a worker whose device is broken keeps its chunks", "workers/queue/claims.py",
               "        self._worker.stop()\n        self.hand_back_all()", "        system.exit(1)"),
        Mutant("a worker ends that is cut off while it moves a job", "jobs/protocol/leases.py",
               "                if not pipe.watching:", "                if True:", kept=True),
        Mutant("a worker ends that is cut off while RQ ends a job", _JOB,
               "except (redis.ConnectionError, redis.TimeoutError):  # redis-py",
               "except redis.WatchError:  # redis-py", kept=True),
    ),
    NothingIsLeft: (
        Mutant("a waiting list never expires", _WAITING,
               "  if list ~= rq then keep(list, seconds) end\n",
               ""),
        Mutant("the jobs of a cancelled run stay", "jobs/protocol/lua/remove.lua",
               "if #gone > 0 then redis.call('UNLINK', unpack(gone)) end\n",
               ""),
        Mutant("a cancelled run keeps its list", "jobs/protocol/lua/remove.lua",
               "  for _, id in ipairs(redis.call('LPOP', list, ARGV[1]) or {}) do\n",
               "  for _, id in ipairs({}) do\n"),
        Mutant("a finished run is not deleted", _LIVE,
               "deleted = self.cleaner.remove(self.run, [], answered=collector.answered, used=used)\n",
               "deleted = None\n"),
        Mutant("texts of a long run's claimed chunks stay when it ends", _RUNS,
               "        for names in pairs[1:]:  # a", "        for names in ():  # a",
               test="tests/faults/test_cancel.py::"
                    "test_chunks_that_workers_have_or_that_pause_are_counted_and_expire"),
        Mutant("a run that is cancelled while its chunks are sent stays", _DRIVER,
               "                self.cancel()\n        self._unsent",
               "                pass\n        self._unsent",
               test="tests/producer/runs/test_collector.py::"
                    "test_a_run_that_is_cancelled_while_chunks_are_sent_leaves_nothing"),
        Mutant("pairs never expire", _RUNS,
               "pipe.set(keys.pairs(run.id, chunk), payload.pairs, ex=run.ttl)",
               "pipe.set(keys.pairs(run.id, chunk), payload.pairs)"),
        Mutant("a run never expires", _RUNS,
               "        pipe.expire(keys.run(run.id), run.ttl)\n        pipe.expire(keys.settled",
               "        pipe.expire(keys.settled"),
        Mutant("a job that is begun keeps the expiry of one that waits", _BEGIN,
               "redis.call('EXPIRE', KEYS[3], ARGV[4])", "redis.call('EXISTS', KEYS[3])",
               test=f"{_BY_NAME}a_job_that_is_begun_no_longer_expires_as_one_that_waits"),
        Mutant("a result makes the stream of a run that is gone", _RUNS,
               "to_entry(run_id, result)), nomkstream=True", "to_entry(run_id, result)), nomkstream=False"),
        Mutant("the pairs of a finished run stay", _RUNS,
               "*(pairs[0] if pairs else ())", "*()"),
        Mutant("a job that has just ended is renewed", "workers/rq/lua/beat.lua",
               "if redis.call('EXISTS', KEYS[1]) == 1 then redis", "if true then redis"),
    ),
    NothingIsLeftBeside: (
        Mutant("what a dead runner has left beside an output stays", "extensions/runners/runner.py",
               "        drop(run, self._settings)\n        clear(run)\n",
               "        drop(run, self._settings)\n", kept=True),
        Mutant("what a runner has that lost its run stays beside the output", "extensions/runners/runner.py",
               '            if self._store.load(run.id).state == "done":\n',
               "            if False:\n", kept=True),
        Mutant("what a dead runner has scored a batch to stays", "extensions/batches/work.py",
               "    clear_workspace(_scored_place(output))\n", "    pass\n", kept=True),
        Mutant("what a dead runner has left is removed by who can sync it", "producer/files/workspace.py",
               "            work.remove()\n",
               "            sync(work.folder)\n            work.remove()\n", kept=True),
    ),
}  # fmt: skip
"""The breaks that each promise must find."""

MUTANTS = tuple(each for found in BREAKS.values() for each in found)


@dataclass(frozen=True)
class Found:
    """What was said of a mutant, after how many seconds of CPU time, by which seed or a test, if any."""

    seconds: float
    seed: str
    said: str


def tree(mutant: Mutant, folder: Path) -> None:
    """A copy of the project in `folder`, with the break."""
    shutil.copy(ROOT / "pyproject.toml", folder)
    for part in ("benchmarks", "configs", "docs/operations", "examples", "tests"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(
        ROOT / "rankmill", folder / "rankmill", symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
    )
    path = folder / "rankmill" / mutant.file
    text = path.read_text()
    assert text.count(mutant.right) == 1, f"{mutant.name}: {text.count(mutant.right)} places"
    path.write_text(text.replace(mutant.right, mutant.wrong))


def look_for(mutant: Mutant, seconds: int) -> Found:
    """Simulate the broken product until something is said, or the seconds of CPU time are over."""
    with tempfile.TemporaryDirectory() as folder:
        tree(mutant, Path(folder))
        how = ["tests.simulation", "--whole", "--tail=0", "--seeds=1000000", f"--cpu-seconds={seconds}"]
        how += ["--found"] * mutant.kept
        if mutant.test:
            how = ["pytest", "-q", "-p", "no:cacheprovider", mutant.test]
        command = [sys.executable, "-m", *how]
        environ = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": folder}
        with subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout
            said = process.stdout.read()
            _, _, used = os.wait4(process.pid, 0)
            process.returncode = 0
        spent = used.ru_utime + used.ru_stime
    if mutant.test and (failed := re.search(r"^FAILED \S+::(\w+).*", said, re.MULTILINE)):
        return Found(spent, "a test", failed[1])
    first = re.match(r"seed (\d+): (.*)", said)
    if first and not mutant.kept and fails_unbroken(first[1]):
        return Found(spent, "", f"SURVIVES: seed {first[1]} fails without the break, too")
    return Found(spent, first[1], first[2]) if first else Found(spent, "", "SURVIVES")


def fails_unbroken(seed: str) -> bool:
    """Whether a seed fails without any break: what was found is no proof then, but a failure to mend."""
    command = [sys.executable, "-m", "tests.simulation", "--whole", "--tail=0", "--first", seed, "--seeds=1"]
    environ = {**os.environ, "PYTHONHASHSEED": "0"}
    return bool(subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, check=False).returncode)


@click.command()
@click.option("--seconds", default=60, show_default=True, help="CPU seconds for which to look for each.")
@click.option("--only", default="", metavar="TEXT", help="Only those with this in their name.")
@click.option("--processes", default=2, show_default=True, help="How many to look for at a time.")
def main(seconds: int, only: str, processes: int) -> None:
    """Break the product in one place after the other, and simulate it."""
    mutants = [each for each in MUTANTS if only in each.name]
    taken = list[float]()
    survivors = 0
    print("| break | CPU seconds | seed | what is said |\n| --- | --- | --- | --- |", flush=True)
    with ThreadPoolExecutor(processes) as threads:
        for mutant, found in zip(
            mutants, threads.map(lambda each: look_for(each, seconds), mutants), strict=True
        ):
            survivors += not found.seed
            taken += [found.seconds] if found.seed else []
            print(f"| {mutant.name} | {found.seconds:.1f} | {found.seed} | {found.said[:120]} |", flush=True)
    print(f"\n{len(taken)} of {len(mutants)} found, in {median(taken or [0]):.1f} s (median)")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
