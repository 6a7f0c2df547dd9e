"""Small breaks of the product, each of which the simulation must find.

``python -m tests.simulation.mutants`` breaks one after the other. One that is not found is a hole in the
checker, or code that nothing needs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mutant:
    """A break: in `file`, `right` becomes `wrong`."""

    name: str
    file: str
    right: str
    wrong: str


MUTANTS = (
    Mutant(
        "a lease is not renewed", "workers/queue/heartbeat.py",
        "self._worker.maintain_heartbeats(execution.job, execution)", "pass",
    ),
    Mutant(
        "a lease ends by the host's clock", "workers/queue/job.py",
        "hold(pipeline, self.key, execution.composite_key, ttl, only_renew=xx)",
        "super().add_execution(execution, pipeline, ttl, xx)",
    ),
    Mutant(
        "a dead worker's jobs stay with it", "jobs/protocol/recovery.py",
        "_guarded(partial(hand_on_abandoned, queue, handle, until=now))", "pass",
    ),
    Mutant(
        "a job whose reply was lost is not rescued", "jobs/protocol/recovery.py",
        "_guarded(partial(rescue_unbegun, queue, seconds, now))", "pass",
    ),
    Mutant(
        "a paused job stays paused", "jobs/protocol/recovery.py",
        "_guarded(partial(enqueue_due, queue, now))", "pass",
    ),
    Mutant(
        "a chunk that kills its worker is not split", "producer/collect/collector.py",
        "and result.died and len(piece.table) > 1", "and result.died and len(piece.table) > 1_000",
    ),
    Mutant(
        "halves are not sent", "producer/collect/collector.py",
        "                fresh += halves\n", "",
    ),
    Mutant(
        "lost chunks are not sent again", "producer/collect/driver.py",
        'self._retry(dict.fromkeys(lost, "it was lost"))', "pass",
    ),
    Mutant(
        "a run that was lost is not stored again", "producer/collect/driver.py",
        "        self._store.restore(self.run)\n        if self.is_detached:", "        if self.is_detached:",
    ),
    Mutant(
        "the stream is read on where it was", "producer/collect/driver.py",
        '        self._after = "0"  # a server that lost', "        # a server that lost",
    ),
    Mutant(
        "pairs never expire", "jobs/protocol/runs.py",
        "pipe.set(keys.pairs(run.id, chunk), payload.pairs, ex=run.ttl)",
        "pipe.set(keys.pairs(run.id, chunk), payload.pairs)",
    ),
    Mutant(
        "scores go to other rows", "workers/engine/engine.py",
        "mine, out, places = scores[done : done + len(rows)], work.scored, work.rows[rows]",
        "mine, out, places = scores[done : done + len(rows)], work.scored, work.rows[rows][::-1]",
    ),
    Mutant(
        "a finished run is not deleted", "producer/collect/driver.py",
        "            self._cleaner.remove(self.run, [], answered=collector.answered)\n", "            pass\n",
    ),
    Mutant(
        "an outage counts as time without workers", "producer/collect/presence.py",
        "if unseen > _WORD_SECONDS:", "if unseen > 1e9:",
    ),
    Mutant(
        "halves are joined in the order of their results", "producer/collect/collector.py",
        "ordered = sorted(chunk.results, key=lambda each: each[0].start)", "ordered = chunk.results",
    ),
)  # fmt: skip


def tree(mutant: Mutant, folder: Path) -> None:
    """A copy of the project in `folder`, with the break."""
    for room in ("jobs", "workers", "producer", "configs", "examples", "tests"):
        shutil.copytree(ROOT / room, folder / room, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(
        ROOT / "rankmill", folder / "rankmill", symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
    )
    path = folder / mutant.file
    text = path.read_text()
    assert text.count(mutant.right) == 1, (
        f"{mutant.name}: {mutant.file} has {text.count(mutant.right)} places"
    )
    path.write_text(text.replace(mutant.right, mutant.wrong))


@click.command()
@click.option("--seconds", default=60, show_default=True, help="How long to look for each.")
@click.option("--only", default="", metavar="TEXT", help="Only those with this in their name.")
def main(seconds: int, only: str) -> None:
    """Break the product in one place after the other, and simulate it."""
    survivors = 0
    for mutant in (each for each in MUTANTS if only in each.name):
        with tempfile.TemporaryDirectory() as name:
            tree(mutant, Path(name))
            command = [sys.executable, "-m", "tests.simulation", "--whole", "--tail", "0"]
            environ = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": name}
            for what in (["--found"], ["--seeds", "100000", "--seconds", str(seconds)]):
                began = time.monotonic()
                done = subprocess.run(
                    [*command, *what], cwd=name, env=environ, capture_output=True, text=True, check=False
                )
                if done.returncode:
                    break
        took = time.monotonic() - began
        survivors += not done.returncode
        said = done.stdout.partition("\n")[0][:120] if done.returncode else "SURVIVES"
        print(f"{mutant.name:50} {took:5.1f} s  {said}", flush=True)
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
