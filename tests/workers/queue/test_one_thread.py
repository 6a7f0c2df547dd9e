"""The queue's side of a worker without its threads, with a model from outside: so a simulation drives it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from benchmarks.simulated import SECONDS, simulated_score
from rankmill import Client
from tests.conftest import Server, run_command

PAIRS = [("big cat", f"moon river {number}") for number in range(40)]

CODE = """
import json, redis, sys, threading
from benchmarks.simulated import SimulatedWorker
from rankmill.jobs.runtime.patience import Patience
from rankmill.jobs.runtime.settings import load_settings

worker = SimulatedWorker(["rankmill"], connection=redis.Redis.from_url({url!r}), name="w")
worker._patience = Patience(1)
worker._prepare(load_settings({{"metrics_address": "none"}}))
claimed = 0
while worker._intake.claim_next(wait=False):
    claimed += 1
leases = worker.connection.zcard("rq:wip:rankmill")
while worker._pipeline.step(wait=False):
    pass
names = [thread.name for thread in threading.enumerate()]
print(json.dumps([claimed, leases, worker.connection.zcard("rq:wip:rankmill"), names]))
"""


def test_it_claims_scores_and_answers_step_by_step(server: Server) -> None:
    run = Client(server.url, model="demo", chunk_size=10).submit(PAIRS)
    environ = {SECONDS: "0", "PYTHONPATH": str(Path(__file__).parents[3])}
    done = run_command("python", "-c", CODE.format(url=server.url), environ=environ)
    assert done.code == 0, done.err
    assert json.loads(done.out) == [4, 4, 0, ["MainThread"]]
    expected = [simulated_score(*pair) for pair in PAIRS]
    np.testing.assert_allclose(run.scores(timeout=10), expected, atol=1e-6)
