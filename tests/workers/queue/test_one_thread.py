"""The queue's side of a worker without its threads, with a model from outside: so a simulation drives it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.simulated import SECONDS, simulated_score
from rankmill import Client
from tests.conftest import Server, run_command

PAIRS = [("big cat", f"moon river {number}") for number in range(40)]

WORKER = """
import json, redis, sys, threading
from benchmarks.simulated import SimulatedWorker
from rankmill.jobs.contract.errors import WorkerError
from rankmill.jobs.runtime.patience import Patience
from rankmill.jobs.runtime.settings import load_settings

loads = []

class Worker(SimulatedWorker):
    def load(self, spec):
        loads.append(spec.model)
        if spec.model != "demo":
            raise WorkerError("there is not enough memory")
        return super().load(spec)

worker = Worker(["rankmill"], connection=redis.Redis.from_url(sys.argv[1]), name="w")
worker._patience = Patience(1)
worker.connection.set_retry(worker._patience)
worker._prepare(load_settings({"metrics_address": "none", "model_cache_size": 1}))
"""

STEPS = """
claimed = 0
while worker._intake.claim_next(wait=False):
    claimed += 1
leases = worker.connection.zcard("rq:wip:rankmill")
while worker._pipeline.step(wait=False):
    pass
names = [thread.name for thread in threading.enumerate()]
print(json.dumps([claimed, leases, worker.connection.zcard("rq:wip:rankmill"), names]))
"""

PUT_ASIDE = """
worker._engines.get(worker._spec("demo"))
while worker._intake.claim_next(wait=False):
    pass
worker._claims.begin_put_aside()
print(json.dumps(loads))
"""


def printed(server: Server, code: str) -> Any:
    """What this code prints after that of `WORKER`."""
    environ = {SECONDS: "0", "PYTHONPATH": str(Path(__file__).parents[3])}
    done = run_command("python", "-c", WORKER + code, server.url, environ=environ)
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_it_claims_scores_and_answers_step_by_step(server: Server) -> None:
    run = Client(server.url, model="demo", chunk_size=10).submit(PAIRS)
    assert printed(server, STEPS) == [4, 4, 0, ["MainThread"]]
    expected = [simulated_score(*pair) for pair in PAIRS]
    np.testing.assert_allclose(run.scores(timeout=10), expected, atol=1e-6)


def test_a_model_that_cannot_be_loaded_is_tried_once_for_the_chunks_that_wait_for_it(server: Server) -> None:
    run = Client(server.url, model="org/large", chunk_size=10).submit(PAIRS * 2)
    assert printed(server, PUT_ASIDE) == ["demo", "org/large"]
    run.cancel()
