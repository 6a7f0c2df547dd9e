"""Removes or changes what a run needs, for `benchmarks.faults.fuzz`. Each attack returns what went wrong.

Keys vanish one by one, the server comes back empty with a clock that is behind, a model's directory changes,
links and pipes are planted beside an output, and options meet inputs that they were not made for.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from benchmarks.engine.models import random_bert
from benchmarks.faults.kills import folder_of, start
from rankmill import Client
from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import RankmillError, RunFailed

CHUNK = 10
PAIRS = [("big cat", f"moon river {number}") for number in range(200)]

LISTS = ("rq:queue:rankmill", "rq:queue:rankmill:intermediate", "rq:wip:rankmill", "rq:scheduled:rankmill",
         "rq:queues", "rq:workers", "rq:workers:rankmill", "rq:worker:*", "rq:job:{run}-*", "rq:executions:*",
         "rankmill:worker:*", "rankmill:queue*", "rankmill:runs", "rankmill:run:{run}:meta",
         "rankmill:run:{run}:pairs:*", "rankmill:run:{run}:results", "rankmill:run:{run}:progress",
         "rankmill:run:{run}:settled")  # fmt: skip
"""Patterns of keys that an operator, a bug or an eviction may remove."""

OPTIONS = (
    ["--limit", "7"], ["--shard", "1/2"], ["--rows-per-part", "9"], ["--top-k", "2"], ["--depth", "1"],
    ["--mean", "ranks"], ["--on-null", "fail"], ["--delimiter", "tab"], ["--list-columns", "passage"],
    ["--text-columns", "query"], ["--with-texts"], ["--long", "split"], ["--all-labels"], ["--tag", "x"],
    ["--output-format", "trec"], ["--output-format", "csv"], ["--query-column", "other"], ["--force"],
    ["--score-column", "passage"], ["--chunk-size", "3"], ["--max-length", "16"], ["--label", "0"],
)  # fmt: skip


@dataclass
class Surroundings:
    """What the attacks need: the server and its workers by name, a model, and a folder of their own."""

    url: str
    server: Any
    model: Path
    folder: Path
    rng: random.Random
    workers: dict[str, subprocess.Popen[bytes]]

    def __post_init__(self) -> None:
        self.folder.mkdir()
        self._count = 0
        self._expected = self._client(self.model).score(PAIRS, timeout=300)
        self._other = random_bert(self.folder / "other", hidden=16, layers=2, seed=1)
        self._of_other = self._client(self._other).score(PAIRS, timeout=300)

    def lose_keys(self) -> list[str]:
        """Remove keys of one kind while a run is scored, which must be whole all the same."""
        pattern = self.rng.choice(LISTS)
        run = self._client(self.model).submit(PAIRS)
        time.sleep(self.rng.uniform(0, 0.2))
        found = [*self.server.scan_iter(pattern.format(run=run.id), count=1000)]
        if found:
            self.server.delete(*found)
        return self._whole(run, f"{pattern} was lost")

    def lose_all_and_the_time(self) -> list[str]:
        """Empty the server, and number what workers write lower than before."""
        run = self._client(self.model).submit(PAIRS)
        with suppress(Exception):  # nobody has written there yet
            self.server.execute_command("XSETID", keys.results(run.id), f"{1 << 50}-0")
        time.sleep(self.rng.uniform(0, 0.2))
        self.server.flushall()
        return self._whole(run, "a server came back empty with its clock behind")

    def change_model(self) -> list[str]:
        """Give the model's directory other weights during a run, whose scores must be of one of the two
        models.
        """
        model = shutil.copytree(self.model, self._new("model"))
        first, *others = self.rng.sample(sorted(self.workers), len(self.workers))
        with self._stopped(*others):
            parts = iter((run := self._client(model).submit(PAIRS)).tables())
            scores = [*next(parts).scores.to_pylist()]
            shutil.copyfile(self._other / "model.safetensors", model / "new")
            (model / "new").replace(model / "model.safetensors")
        with self._stopped(*([first] if self.rng.random() < 0.5 else [])):
            try:
                for part in parts:
                    scores += part.scores.to_pylist()
            except RunFailed as error:
                return [] if "content" in str(error) else [f"a changed model: {error}"]
            except RankmillError as error:
                return [f"a changed model: {error}"]
            finally:
                run.cancel()
        alike = [np.allclose(scores, each, atol=1e-5) for each in (self._expected, self._of_other)]
        return [] if any(alike) else ["a run has scores of two models"]

    def plant(self) -> list[str]:
        """Put something else where score-file writes, which must harm nothing, hold up nobody, and say so."""
        place = self._new("planted")
        place.mkdir()
        victim, output = place / "victim", place / "out.parquet"
        victim.write_text("precious")
        work = folder_of(output)
        number = self.rng.randrange(9)
        if number in {1, 2, 3, 4}:
            work.mkdir(0o700)
        match number:
            case 0:
                work.symlink_to(place)
            case 1 | 3:
                (work / ("lock" if number == 1 else "journal.db")).symlink_to(victim)
            case 2 | 4:
                os.mkfifo(work / ("lock" if number == 2 else "journal.db"))
            case 5 | 6:
                os.mkfifo(output if number == 5 else work)
            case 7:
                output.symlink_to(victim)
            case 8:
                output.mkdir()
        more = ["--force"] if self.rng.random() < 0.5 else []
        complaint = self._command([self._pairs(place), "-o", output, *more], {0, 1, 2})
        if victim.read_text() != "precious" and not output.is_symlink():
            complaint.append(f"planted {number}: a file that is not the output was written to")
        return complaint

    def mix_options(self) -> list[str]:
        """Combine options that nobody tried together, which must work, or be refused in one line."""
        place = self._new("options")
        place.mkdir()
        options = [word for chosen in self.rng.sample(OPTIONS, self.rng.randint(1, 4)) for word in chosen]
        output = place / "out"
        complaint = self._command([self._pairs(place), "-o", output, "--output-format", "parquet", *options],
                                  {0, 2, 3})  # fmt: skip
        if not complaint and "--limit" in options and output.is_file():
            with suppress(Exception):  # another format was chosen
                rows = pq.read_metadata(output).num_rows
                complaint += [f"--limit 7 gave {rows} rows: {options}"] if rows > 7 else []
        return complaint

    def _client(self, model: Path) -> Client:
        return Client(self.url, model=str(model), precision="fp32", chunk_size=CHUNK, max_retries=1)

    def _new(self, name: str) -> Path:
        self._count += 1
        return self.folder / f"{name}-{self._count}"

    def _pairs(self, place: Path) -> Path:
        file = place / "in.jsonl"
        rows = [{"query": query, "passage": passage, "other": "x"} for query, passage in PAIRS[:30]]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return file

    @contextmanager
    def _stopped(self, *names: str) -> Iterator[None]:
        for name in names:
            self.workers[name].send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for name in names:
                self.workers[name].send_signal(signal.SIGCONT)

    def _whole(self, run: Any, what: str) -> list[str]:
        try:
            scores = run.scores(timeout=90)
        except (TimeoutError, RankmillError) as error:
            return [f"{what}: {error}"]
        finally:
            with suppress(RankmillError):
                run.cancel()
        if np.allclose(scores, self._expected, atol=1e-5):
            return []
        return [f"{what}: {int(np.isnan(scores).sum())} rows without a score, {dict(list(run.errors)[:1])}"]

    def _command(self, words: list[object], codes: set[int]) -> list[str]:
        process = start(*words, "--redis", self.url, "--model", self.model, "--precision", "fp32")
        try:
            _, err = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()
            return [f"score-file does not end: {words}"]
        if process.returncode in codes and "Traceback" not in err:
            return []
        return [f"score-file ended with {process.returncode}: {words}: {err[-1500:]}"]
