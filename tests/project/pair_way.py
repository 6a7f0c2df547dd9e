"""``python -m tests.project.pair_way``: the files that a pair passes, from the input's row to the output's.

score-file runs twice beside a worker, in one process: the second input has twice as many chunks. A function
passes pairs on if it is called more often the second time, by at least half a call for each further chunk.
Clocks are slow meanwhile: on a busy machine, what is done every second or so would count as well.
Files stand in the order of their first call. A call into a file that stands above the caller's is a return.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import redis

from rankmill.jobs.contract.file_request import FileRequest
from rankmill.jobs.runtime.settings import load_settings
from rankmill.jobs.system import system
from rankmill.score.score_file import score_file
from rankmill.workers.worker import ScoringWorker
from tests.harness.servers.valkey import serve

PACKAGE = Path(__file__).resolve().parents[2] / "rankmill"
CHUNKS = 24
ROWS = 8
"""Rows of a chunk."""

SLOWER = 20
"""How much slower rankmill's clock goes."""

_known: dict[str, str] = {}
"""Paths of files, and what `_file` says of them."""


class Way(NamedTuple):
    """Files in the order in which a pair meets them, and the calls that lead back: caller and callee."""

    files: list[str]
    returns: list[tuple[str, str]]


class Calls:
    """Counts the calls of rankmill's functions in all threads, and from which file each came."""

    def __init__(self) -> None:
        self.of: Counter[tuple[str, str]] = Counter()
        self.between: Counter[tuple[str, str]] = Counter()

    def note(self, frame: FrameType) -> None:
        """Count the call that has just begun."""
        if callee := _file(frame):
            self.of[callee, frame.f_code.co_qualname] += 1
            caller = frame.f_back
            while caller is not None and not _file(caller):
                caller = caller.f_back
            if caller is not None and (name := _file(caller)) != callee:
                self.between[name, callee] += 1


def _file(frame: FrameType) -> str:
    """The file of a function of rankmill, from its root; empty for all others."""
    path = frame.f_code.co_filename
    if path not in _known:
        _known[path] = os.path.relpath(path, PACKAGE) if path.startswith(f"{PACKAGE}/") else ""
    return _known[path]


def pair_way() -> Way:
    """The way of a pair, by running score-file and a worker here: it takes a few seconds."""
    counts = [Calls()]

    def score_twice() -> None:
        try:
            # the first run loads the model, and proves the batches that come later
            for number, chunks in enumerate((2 * CHUNKS, CHUNKS, 2 * CHUNKS)):
                counts.append(Calls())
                _score(Path(folder) / f"{number}.parquet", url, chunks)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            counts[-1].note(frame)

    began = time.monotonic()
    system.monotonic = lambda: began + (time.monotonic() - began) / SLOWER
    serving = contextmanager(serve)
    with tempfile.TemporaryDirectory() as folder, serving() as server:
        url = server.url
        os.environ |= {"RANKMILL_REDIS_URL": url, "RANKMILL_BACKEND": "torch", "RANKMILL_DEVICE": "cpu"}
        threading.setprofile(note)
        sys.setprofile(note)
        threading.Thread(target=score_twice).start()
        try:
            ScoringWorker(["rankmill"], connection=redis.Redis.from_url(url)).work()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    *_, once, twice = counts
    passing = {name for name, calls in twice.of.items() if calls - once.of[name] >= CHUNKS / 2}
    files = list(dict.fromkeys(file for file, function in twice.of if (file, function) in passing))
    place = {file: number for number, file in enumerate(files)}
    back = [
        (caller, callee)
        for (caller, callee), calls in twice.between.items()
        if calls - once.between[caller, callee] >= CHUNKS / 2
        and caller in place and callee in place and place[callee] < place[caller]
    ]  # fmt: skip
    return Way(files, back)


def _score(source: Path, url: str, chunks: int) -> None:
    texts = [f"what is {number}" for number in range(chunks * ROWS)]
    pq.write_table(pa.table({"query": texts, "passage": texts[::-1]}), source)
    request = FileRequest(inputs=(str(source),), output=str(source.with_suffix(".out.parquet")))
    settings = load_settings({"redis_url": url, "model": "demo", "chunk_size": ROWS})
    score_file(request, settings, view=lambda _: nullcontext(lambda *_: None))


def main() -> None:
    """Print the way."""
    way = pair_way()
    for file in way.files:
        print(file)
    print(f"{len(way.files)} files, {len(way.returns)} returns:")
    for caller, callee in way.returns:
        print(f"  {caller} -> {callee}")


if __name__ == "__main__":
    main()
