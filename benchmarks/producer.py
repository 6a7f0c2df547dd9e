"""Measures the CPU seconds of score-file itself for a million pairs, with workers that compute nothing.

    python -m benchmarks.producer                                   # shipped pairs, filled up, repeated
    python -m benchmarks.producer --pairs FILE --rows 200000 --format csv --runs 3 --profile producer.prof
    python -m benchmarks.producer --format run --rows 1000000 --texts 1000000
    python -m benchmarks.producer --store --runs 3                  # each run also from and to an S3 server
    python -m benchmarks.producer --store --speed 20000 --rows 400000 --runs 3    # workers of that speed

The input is made of the pairs, repeated. score-file scores it over the queue as always; the workers do
everything but the forward pass. A run has 1,000 passages of each query, from a corpus of ``--texts`` texts,
whose index is made before. The command reports the CPU time of score-file's process without its start, of all
threads together and of each kind of thread. The busiest thread bounds how fast one producer is if there are
enough cores.

From Parquet, each run is followed by a plain pyarrow script in a process of its own, which reads the same
file, encodes and compresses the same chunks, and writes the same columns. ``over_plain`` is score-file's CPU
time over the script's, which does not depend on the machine's speed.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import logging
import multiprocessing
import os
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv
import pyarrow.parquet as pq

from benchmarks.cluster import cluster
from benchmarks.queue import SPEED
from rankmill.extensions.lab.pairs import sample
from rankmill.producer.files.formats.parquet import ROW_GROUP_ROWS


def main() -> None:
    """Measure, and print a line for each run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument(
        "--pairs", default="varied", help="a file, or pairs that rankmill ships: varied, example"
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--format", choices=["parquet", "csv", "run"], default="parquet")
    parser.add_argument("--texts", type=int, default=100_000, help="size of the corpus of a run")
    parser.add_argument("--chunk-size", default="4096", help="rows, or auto")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--store", action="store_true", help="measure also from and to an S3 server on this host, in turn"
    )
    parser.add_argument("--speed", type=float, help="pairs a second of a worker, which sleeps")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--profile", type=Path, help="also write a profile of the last run's Python code")
    args = parser.parse_args()
    if args.speed:
        os.environ[SPEED] = str(args.speed)
    with (
        tempfile.TemporaryDirectory() as name,
        cluster(args.workers, 1, "benchmarks.queue.IdleWorker") as place,
        ExitStack() as stack,
    ):
        if args.format == "run":
            source = write_run(Path(name), args.pairs, args.rows, args.texts)
        else:
            source = write_input(Path(name), args.pairs, args.rows, args.format)
        sources = [str(source)]
        if args.store:
            sources.append(stack.enter_context(in_store(source)))
        for run in range(args.runs):
            profile = args.profile if run == args.runs - 1 else None
            for each in sources:
                found = measure(each, place.url, args.rows, args.chunk_size, profile)
                if args.format == "parquet" and each == str(source) and args.chunk_size.isdigit():
                    plain = plain_seconds(source, int(args.chunk_size))
                    found["plain_cpu_seconds"] = round(plain, 2)
                    found["over_plain"] = round(found["cpu_seconds"] / plain, 2)
                print(
                    json.dumps({"from": each.partition(":")[0] if "://" in each else "disk", **found}),
                    flush=True,
                )


def write_input(folder: Path, pairs: str, rows: int, kind: str) -> Path:
    """Write a file of `rows` rows, in which the pairs are repeated."""
    part = sample(pairs, min(rows, 10_000)).cast(
        pa.schema([("query", pa.string()), ("passage", pa.string())])
    )
    path = folder / f"input.{kind}"
    schema = part.schema.append(pa.field("id", pa.int64()))
    writer = pq.ParquetWriter(path, schema) if kind == "parquet" else pcsv.CSVWriter(path, schema)
    with writer:
        for start in range(0, rows, len(part)):
            ids = pa.array(range(start, min(start + len(part), rows)))
            block = part.slice(0, len(ids))
            # no two passages are the same, because a dictionary of passages would not help in real files
            # either
            passages = pc.binary_join_element_wise(ids.cast(pa.string()), block["passage"], " ")
            writer.write_table(pa.table([block["query"], passages, ids], schema=schema))
    return path


def write_run(folder: Path, pairs: str, rows: int, texts: int) -> Path:
    """Write a TREC run of `rows` rows, its queries, and a corpus of `texts` texts with its index."""
    from rankmill.producer.files.corpus.index import on_disk
    from rankmill.producer.files.stores.reading import fingerprint

    part = sample(pairs, 10_000)
    corpus = folder / "corpus.parquet"
    schema = pa.schema([("_id", pa.string()), ("text", pa.string())])
    with pq.ParquetWriter(corpus, schema) as writer:
        for start in range(0, texts, len(part)):
            ids = pa.array(range(start, min(start + len(part), texts))).cast(pa.string())
            whole = pc.binary_join_element_wise(
                ids, part["passage"].slice(0, len(ids)).cast(pa.string()), " "
            )
            writer.write_table(pa.table([ids, whole], schema=schema))
    queries = part["query"].cast(pa.string()).to_pylist()
    count = max(rows // 1000, 1)
    lines = (
        json.dumps({"_id": f"q{n}", "text": f"{n} {queries[n % len(queries)]}"}) + "\n" for n in range(count)
    )
    (folder / "queries.jsonl").write_text("".join(lines))
    random = np.random.default_rng(0)
    with (folder / "run.trec").open("w") as run:
        for query in range(count):
            found = random.choice(texts, min(1000, texts), replace=False).tolist()
            run.writelines(
                f"q{query} Q0 {doc} {rank} {1000 - rank} bm25\n" for rank, doc in enumerate(found, 1)
            )
    on_disk([corpus], [fingerprint(corpus)])
    return folder / "run.trec"


@contextmanager
def in_store(source: Path) -> Iterator[str]:
    """Start an S3 server (moto's), and upload a file; yields its URL."""
    import s3fs
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ.update(
        AWS_ENDPOINT_URL=f"http://{host}:{port}",
        AWS_ACCESS_KEY_ID="measured",
        AWS_SECRET_ACCESS_KEY="measured",
        AWS_DEFAULT_REGION="us-east-1",
        XDG_STATE_HOME=str(source.parent / "state"),
    )
    store = s3fs.S3FileSystem()
    store.mkdir("measured")
    store.put_file(str(source), f"measured/{source.name}")
    yield f"s3://measured/{source.name}"
    server.stop()


def measure(
    source: str, url: str, rows: int, chunk_size: str, profile: Path | None = None, model: str = "demo"
) -> dict[str, Any]:
    """One run in a process of its own."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_score, args=(there, source, url, chunk_size, profile, model))
    process.start()
    there.close()  # so that its end is seen
    try:
        found: dict[str, Any] = here.recv()
    except EOFError:
        raise SystemExit("score-file failed, as it says above") from None
    process.join()
    million = 1_000_000 / rows
    threads = {name: round(seconds * million, 2) for name, seconds in found["threads"].items()}
    return {
        "rows": rows,
        "seconds": round(found["seconds"], 2),
        "cpu_seconds": round(found["cpu"], 2),
        "system_share": round(found["system"] / found["cpu"], 2),
        "cpu_seconds_per_million": round(found["cpu"] * million, 2),
        "busiest_thread_per_million": round(found["busiest"] * million, 2),
        "threads_per_million": dict(sorted(threads.items(), key=lambda each: -each[1])),
        "peak_mib": round(found["peak"] / 2**20),
        "peak_own_mib": round(found["own"] / 2**20),  # without pages of mapped files, such as a corpus' index
    }


def plain_seconds(source: Path, chunk_rows: int) -> float:
    """CPU seconds of the plain script."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_plain, args=(there, source, chunk_rows))
    process.start()
    found: float = here.recv()
    process.join()
    return found


def _plain(out: Any, source: Path, chunk_rows: int) -> None:
    """Read, encode, compress and write with only pyarrow."""
    random = np.random.default_rng(0)
    before = os.times()
    codec = pa.Codec("zstd", compression_level=-5)
    writer: pq.ParquetWriter | None = None
    for batch in pq.ParquetFile(source).iter_batches(ROW_GROUP_ROWS):
        table = pa.table(batch)
        for start in range(0, len(table), chunk_rows):
            chunk = table.slice(start, chunk_rows)
            texts = [chunk["query"].dictionary_encode(), chunk["passage"]]
            pairs = pa.table(texts, names=["query", "passage"])
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, pairs.schema) as stream:
                stream.write_table(pairs)
            codec.compress(sink.getvalue())
        scored = table.append_column("score", pa.array(random.random(len(table), np.float32)))
        writer = writer or pq.ParquetWriter(
            source.with_suffix(".plain.parquet"), scored.schema, compression="zstd"
        )
        writer.write_table(scored)
    if writer:
        writer.close()
    after = os.times()
    out.send(after.user - before.user + after.system - before.system)


def _score(out: Any, name: str, url: str, chunk_size: str, profile: Path | None, model: str) -> None:
    import rankmill.producer.files.corpus.ranking_source  # noqa: F401 (pandas, imported where it is needed)
    from rankmill.jobs.contract.file_request import FileRequest
    from rankmill.jobs.runtime.settings import load_settings
    from rankmill.producer.files.stores.paths import as_path
    from rankmill.score.progress import progress_view
    from rankmill.score.score_file import score_file

    source = as_path(name)
    settings = load_settings({"redis_url": url, "model": model, "chunk_size": chunk_size})
    inputs: dict[str, Any] = {"inputs": (str(source),)}
    if source.suffix == ".trec":
        queries, corpus = (str(source.with_name(name)) for name in ("queries.jsonl", "corpus.parquet"))
        inputs = {"run": str(source), "queries": (queries,), "corpus": (corpus,)}
    output = str(source.with_suffix(".scored.parquet"))
    request = FileRequest(**inputs, output=output, force=True, restart=True)
    watch = _Watch()
    recorder = cProfile.Profile(time.thread_time)
    watch.start()
    started, before = time.perf_counter(), os.times()
    if profile:
        recorder.enable()
    score_file(request, settings, view=partial(progress_view, quiet=True))
    recorder.disable()
    seconds, after = time.perf_counter() - started, os.times()
    watch.end()
    if profile:
        recorder.dump_stats(profile)
    system, own = after.system - before.system, watch.seconds.pop(watch.native_id or 0, 0.0)
    out.send(
        {
            "seconds": seconds,
            "cpu": after.user - before.user + system - own,
            "system": system,
            "busiest": max(watch.seconds.values()),
            "threads": watch.by_kind(),
            "peak": max(getattr(psutil.Process().memory_info(), "peak_wset", 0), _peak()),
            "own": watch.own_bytes,
        }
    )


class _Watch(threading.Thread):
    """Notes the CPU seconds of this process's threads, and its peak memory without mapped files (Linux)."""

    def __init__(self) -> None:
        super().__init__(name="watch")
        self.seconds: dict[int, float] = {}
        """CPU seconds by the thread's id, also of threads that have ended, read every 50 ms."""
        self.own_bytes = 0
        self._names: dict[int, str] = {}
        self._before = self._read()
        self._ended = threading.Event()

    def run(self) -> None:
        status = Path("/proc/self/status")
        while not self._ended.wait(0.05):
            self._look()
            lines = status.read_text().splitlines() if status.exists() else []
            own = next((line for line in lines if line.startswith("RssAnon:")), "0 0")
            self.own_bytes = max(self.own_bytes, int(own.split()[1]) << 10)

    def end(self) -> None:
        self._ended.set()
        self.join()
        self._look()

    def by_kind(self) -> dict[str, float]:
        """The seconds of threads with one name and different numbers; Arrow's own are ``native``."""
        found: defaultdict[str, float] = defaultdict(float)
        for thread, seconds in self.seconds.items():
            found[self._names.get(thread, "native").rstrip("_0123456789")] += seconds
        return dict(found)

    def _look(self) -> None:
        self._names |= {each.native_id or 0: each.name for each in threading.enumerate()}
        found = self._read().items()
        self.seconds |= {thread: seconds - self._before.get(thread, 0.0) for thread, seconds in found}

    def _read(self) -> dict[int, float]:
        return {each.id: each.user_time + each.system_time for each in psutil.Process().threads()}


def _peak() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
