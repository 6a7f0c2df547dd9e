"""Files in object stores: paths, reading, waiting."""

from __future__ import annotations

import gc
import gzip
import io
import json
import logging
import time
import weakref
from collections.abc import AsyncIterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import s3fs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankmill.jobs.contract.errors import InputChanged, InputError, OutputBusy, StoreError
from rankmill.jobs.system import Backoff
from rankmill.producer.collect.sizing import Sizing
from rankmill.producer.files.formats.base import TextColumns
from rankmill.producer.files.inputs import find_files
from rankmill.producer.files.source import FileSource, open_source
from rankmill.producer.files.stores import lock, paths, reading, writing
from rankmill.producer.files.stores.paths import ObjectPath, as_path, is_url, object_path, resolved
from rankmill.producer.files.stores.reading import ObjectReader, fingerprint
from rankmill.producer.files.stores.writing import identity, put
from tests.conftest import wait_for
from tests.harness.models.hub import hub
from tests.harness.servers.buckets import Bucket

ROWS = [{"query": "q", "passage": f"p {n}", "n": n} for n in range(20)]


def store_object(url: str, data: bytes) -> str:
    with fsspec.open(url, "wb") as file:
        file.write(data)
    return url


def parquet(rows: list[dict[str, object]]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink, row_group_size=6)
    return sink.getvalue()


def lines(rows: list[dict[str, object]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


class _Whole(SimpleHTTPRequestHandler):
    """Sends files as a whole, as ``python -m http.server`` does."""

    def log_message(self, *_: object) -> None:
        pass


class _Unknown(_Whole):
    """Does not say how long a file is."""

    def send_header(self, keyword: str, value: str) -> None:
        if keyword.lower() != "content-length":
            super().send_header(keyword, value)


def opened(*names: str) -> FileSource:
    return open_source(find_files(names), TextColumns("query", "passage"), allow_nulls=True)


def read(*names: str) -> list[dict[str, object]]:
    return [row for table in opened(*names).tables(Sizing(7)) for row in table.to_pylist()]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.parquet", parquet(ROWS)),
        ("a.jsonl", lines(ROWS)),
        ("a.jsonl.gz", gzip.compress(lines(ROWS))),
        ("a.json", json.dumps(ROWS).encode()),
        ("a.csv", "".join(["query,passage,n\n", *(f"q,p {n},{n}\n" for n in range(20))]).encode()),
    ],
)
def test_objects_are_read_like_files(bucket: Bucket, name: str, data: bytes) -> None:
    rows = [{**row, "n": str(row["n"])} for row in ROWS] if name == "a.csv" else ROWS
    assert read(store_object(f"{bucket.url}/in/{name}", data)) == rows


def test_folders_and_globs_are_read_in_order_with_their_partitions(bucket: Bucket) -> None:
    for day in (2, 1):
        store_object(f"{bucket.url}/in/day={day}/a.jsonl", lines(ROWS[day : day + 1]))
    store_object(f"{bucket.url}/in/notes.txt", b"no pairs")
    expected = [{**ROWS[day], "day": day} for day in (1, 2)]
    assert read(f"{bucket.url}/in") == expected
    assert read(f"{bucket.url}/in/**/*.jsonl") == expected
    assert read(f"{bucket.url}/in/day=2/a.jsonl") == [ROWS[2]]
    spelled = bucket.url.replace("s3://", "s3a://")
    assert read(f"{spelled}/in") == expected
    assert str(find_files([f"{spelled}/in"])[0].path) == f"{spelled}/in/day=1/a.jsonl"
    with pytest.raises(InputError, match="/nothing: no such object"):
        find_files([f"{bucket.url}/nothing"])


def test_hidden_objects_are_read_only_where_they_are_asked_for(bucket: Bucket) -> None:
    for number, name in enumerate(["a", "_temporary/0/b", "_day=1/c", "deep/.d", "_e"]):
        store_object(f"{bucket.url}/in/{name}.jsonl", lines(ROWS[number : number + 1]))

    def numbers(name: str) -> list[object]:
        return [row["n"] for row in read(f"{bucket.url}/in{name}")]

    assert numbers("") == numbers("/**/*.jsonl") == [2, 0]
    assert numbers("/*.jsonl") == [0]
    assert numbers("/_*.jsonl") == numbers("/_e.jsonl") == [4]
    assert numbers("/_temporary") == numbers("/_t*/*/*.jsonl") == [1]
    with pytest.raises(InputError, match="holds only hidden files"):
        numbers("/deep")


def test_a_glob_reads_each_folder_anew_and_leaves_out_none_that_cannot_be_listed(
    bucket: Bucket, s3_store: s3fs.S3FileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    for day in (1, 2):
        store_object(f"{bucket.url}/in/day={day}/a.jsonl", lines(ROWS[day : day + 1]))
    patterns = [f"{bucket.url}/in/{pattern}" for pattern in ("*/*.jsonl", "day=*/a*.jsonl", "**/*.jsonl")]
    assert [len(find_files([pattern])) for pattern in patterns] == [2, 2, 2]
    s3_store.pipe_file(f"{bucket.url}/in/day=2/a2.jsonl", lines(ROWS[3:4]))  # as another process would
    assert [len(find_files([pattern])) for pattern in patterns] == [3, 3, 3]

    monkeypatch.setattr(paths, "_BACKOFF", Backoff(first=0.001, longest=0.001))
    real, refused = s3fs.S3FileSystem._iterdir, iter([OSError("internal error"), PermissionError("Denied")])

    async def listed(self: s3fs.S3FileSystem, bucket: str, **options: object) -> AsyncIterator[object]:
        if str(options["prefix"]).startswith("in/day=2"):
            for error in refused:
                raise error
        async for entry in real(self, bucket, **options):
            yield entry

    monkeypatch.setattr(s3fs.S3FileSystem, "_iterdir", listed)
    with pytest.raises(StoreError, match="no permission \\(Denied\\)"):
        find_files(patterns[:1])
    assert len(find_files(patterns[:1])) == 3

    refused = iter([FileNotFoundError("in/day=2")])  # another process has removed it after it was listed
    assert [file.path.parent.name for file in find_files(patterns[:1])] == ["day=1"]


def test_an_object_that_changes_while_it_is_read_is_noticed(bucket: Bucket) -> None:
    url = store_object(f"{bucket.url}/a.jsonl", lines(ROWS))
    source = opened(url)
    store_object(url, lines([{**row, "query": "r"} for row in ROWS]))  # of the same size
    with pytest.raises(InputChanged, match=r"a\.jsonl has changed while it was read"):
        list(source.tables(Sizing(7)))


def test_files_of_the_hub_are_read_with_its_own_client(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"data/a.parquet": parquet(ROWS[:9]), "data/b.parquet": parquet(ROWS[9:]), "README.md": b"#"}
    with hub("someone/pairs", files) as url:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setitem(fsspec.config.conf, "hf", {"endpoint": url, "token": False})
        name = "hf://datasets/someone/pairs"
        assert read(f"{name}/data/*.parquet") == ROWS
        assert read(f"{name}/data/b.parquet") == ROWS[9:]
        source = opened(f"{name}/data/a.parquet")
        files["data/a.parquet"] = parquet(list(reversed(ROWS[:9])))
        with pytest.raises(InputChanged, match=r"data/a\.parquet has changed while it was read"):
            list(source.tables(Sizing(7)))
        with pytest.raises(InputError, match="no such object"):
            opened(f"{name}/data/c.parquet")


def test_what_a_path_of_an_object_is(bucket: Bucket, tmp_path: Path) -> None:
    path = object_path(f"{bucket.url}/out/a.csv.gz")
    assert isinstance(path.parent / "b", ObjectPath)
    assert not isinstance(path, Path)  # else what is not of a store would look at this host's disk
    assert (str(path), resolved(path), path.suffixes) == (f"{bucket.url}/out/a.csv.gz", path, [".csv", ".gz"])
    assert str(path.with_name("b")) == f"{bucket.url}/out/b"
    assert (path.exists(), path.parent.is_dir()) == (False, False)
    (tmp_path / "a").write_bytes(b"12345")
    before = identity(tmp_path / "a", path)
    put(tmp_path / "a", path)
    assert (path.is_file(), path.is_dir(), path.parent.is_dir()) == (True, False, True)
    assert (list(path.parent.iterdir()), identity(path, path)) == ([path], before)
    first = fingerprint(path)
    assert first.startswith("5 bytes ETag ")
    store_object(str(path), b"54321")
    assert fingerprint(path) != first
    path.unlink()
    path.unlink(missing_ok=True)
    assert not path.exists()
    with pytest.raises(InputError, match=r"a\.csv\.gz: no such object"):
        fingerprint(path)


@pytest.mark.parametrize("url", ["s3://KEY:SECRET@bucket/a.csv", "https://host/a.csv?X-Amz-Signature=SECRET"])
def test_a_url_with_a_secret_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(InputError, match="a URL with a password or a signature") as refused:
        find_files([url])
    assert "SECRET" not in str(refused.value)
    assert "KEY" not in str(refused.value)


def test_names_and_urls() -> None:
    assert [is_url(name) for name in ("s3://b/k", "az://c/k", "a/b.csv", "c:x", "-")] == [
        True, True, False, False, False
    ]  # fmt: skip
    assert as_path("file:///tmp/a.csv") == Path("/tmp/a.csv")
    with pytest.raises(InputError, match=r"empty parts, \. or \.\. are not supported"):
        object_path("s3://bucket/a//b.csv")
    with pytest.raises(InputError, match="xyz"):
        find_files(["xyz://bucket/a.csv"])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(
    st.binary(max_size=60),
    st.lists(st.tuples(st.integers(0, 70), st.integers(-1, 30)), max_size=8),
    st.integers(1, 9),
)
def test_an_object_is_read_as_if_it_were_in_memory(
    monkeypatch: pytest.MonkeyPatch, data: bytes, reads: list[tuple[int, int]], block: int
) -> None:
    monkeypatch.setattr(reading, "_BLOCK_BYTES", block)
    monkeypatch.setattr(reading, "_KEPT", 3)
    reader, plain = ObjectReader(object_path(store_object("memory://a/b", data))), io.BytesIO(data)
    for place, size in reads:
        assert reader.seek(place) == plain.seek(place)
        assert reader.read(size) == plain.read(size)
        assert reader.tell() == max(plain.tell(), place)


def test_a_block_is_fetched_once_and_freed_with_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers that only the garbage collector freed kept their blocks, and hung where it ran in a thread."""
    monkeypatch.setattr(reading, "_BLOCK_BYTES", 4)
    path = object_path(store_object("memory://a/d.jsonl", lines(ROWS)))
    system, starts = path.store[0], []
    real = system.cat_file

    def cat_file(name: str, start: int, end: int) -> object:
        starts.append(start)
        return real(name, start=start, end=end)

    monkeypatch.setattr(system, "cat_file", cat_file)
    reader = ObjectReader(path)
    data = reader.read()
    assert data == lines(ROWS)
    assert sorted(starts) == list(range(0, len(lines(ROWS)), 4))
    gone = weakref.ref(reader)
    gc.disable()
    try:
        del reader
        wait_for(lambda: gone() is None)
    finally:
        gc.enable()


def test_a_store_that_fails_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(paths, "_BACKOFF", Backoff(first=0.001, longest=0.001))
    path = object_path(store_object("memory://a/c.jsonl", lines(ROWS)))
    system = path.store[0]
    real, calls = system.cat_file, []

    def cat_file(*arguments: object, **options: object) -> object:
        calls.append(1)
        if len(calls) < 4:
            raise ConnectionError("reset by peer")
        found = real(*arguments, **options)
        return found[:-1] if len(calls) == 4 else found  # cut off

    monkeypatch.setattr(system, "cat_file", cat_file)
    with caplog.at_level(logging.WARNING):
        assert ObjectReader(path).read() == lines(ROWS)
    assert "memory://a/c.jsonl: the store does not serve, trying again: reset by peer" in caplog.text
    assert "bytes came instead of" in caplog.text


def test_a_store_that_stays_away_or_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "_BACKOFF", Backoff(first=0.001, longest=0.001))

    def fails(error: Exception) -> None:
        raise error

    for error, kind, message in [
        (ConnectionError("refused"), StoreError, "x: the store does not serve: refused"),
        (PermissionError("Access Denied"), StoreError, r"x: no permission \(Access Denied\)"),
        (FileNotFoundError("x"), InputError, "x: no such object"),
        (ImportError("Install gcsfs"), InputError, r"x: Install gcsfs \(pip install"),
        (ValueError("Protocol not known"), InputError, "x: Protocol not known"),
    ]:
        with pytest.raises(kind, match=message):
            paths.patiently("x", partial(fails, error), 0.01)


def test_what_takes_longer_than_the_wait_is_tried_again_after_a_failure() -> None:
    calls: list[int] = []

    def upload() -> str:
        calls.append(1)
        time.sleep(0.3)
        if len(calls) == 1:
            raise ConnectionError("reset by peer")
        return "done"

    assert paths.patiently("x", upload, 0.2) == "done"


def test_an_object_is_sent_in_pieces_that_fit_into_memory(
    bucket: Bucket, s3_store: s3fs.S3FileSystem, tmp_path: Path
) -> None:
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(40 << 20)
    put(large, object_path(f"{bucket.url}/large"))
    found = s3_store.info(f"{bucket.url}/large")
    assert (found["size"], found["ETag"].strip('"')[-2:]) == (40 << 20, "-3")


def test_an_object_is_sent_again_if_its_upload_is_gone(
    bucket: Bucket, s3_store: s3fs.S3FileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "_PIECE_BYTES", 5 << 20)
    monkeypatch.setattr(paths, "_BACKOFF", Backoff(first=0.001, longest=0.001))
    real, gone = s3fs.S3FileSystem._call_s3, iter([FileNotFoundError("The specified upload does not exist")])

    async def call(self: s3fs.S3FileSystem, method: str, *arguments: object, **options: object) -> object:
        answer = await real(self, method, *arguments, **options)
        if method == "complete_multipart_upload":
            for error in gone:  # the answer was lost, and the server does not know the upload any more
                raise error
        return answer

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", call)
    large = tmp_path / "large"
    large.write_bytes(b"a" * (11 << 20))
    put(large, object_path(f"{bucket.url}/large"))
    assert next(gone, None) is None
    assert s3_store.info(f"{bucket.url}/large")["size"] == 11 << 20
    large.write_bytes(b"a" * (11 << 20))
    with pytest.raises(InputError, match="s3://there-is-no-such-bucket/large: no such object"):
        put(large, object_path("s3://there-is-no-such-bucket/large"))


def test_a_lock_is_its_holders_until_it_does_not_change_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(lock, "LEASE_SECONDS", 2.0)
    path, output = object_path("memory://locks/_a.rankmill"), Path("a")
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
    first = lock.ObjectLock(path, output, folders[0])
    with first:
        with pytest.raises(OutputBusy, match=r"score-file on host .* is making a; let it finish"):
            lock.ObjectLock(path, output, folders[1]).__enter__()
        first.check()
    assert not path.exists()

    first = lock.ObjectLock(path, output, folders[0]).__enter__()
    first._periodic.stop(None)  # as if it were killed
    again = lock.ObjectLock(path, output, folders[0]).__enter__()  # the same command continues at once
    again._periodic.stop(None)
    monkeypatch.setattr(lock, "LEASE_SECONDS", 0.2)
    with lock.ObjectLock(path, output, folders[1]) as second:
        second.check()
        again._renew()  # it was only away, and comes back
        with pytest.raises(OutputBusy, match="is making it now, because this host did not answer"):
            again.check()
        again.__exit__(None, None, None)
        assert path.exists()
    assert not path.exists()


def test_the_right_to_delete_is_needed_only_for_what_is_there(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = s3fs.S3FileSystem._call_s3

    async def call(self: s3fs.S3FileSystem, method: str, *arguments: object, **options: object) -> object:
        if method == "delete_object":
            raise PermissionError("Access Denied")
        return await real(self, method, *arguments, **options)

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", call)
    object_path(f"{bucket.url}/a.errors.jsonl").unlink(missing_ok=True)
    with pytest.raises(StoreError, match=r"cannot delete s3://.*/a: no permission \(Access Denied\)"):
        object_path(store_object(f"{bucket.url}/a", b"1")).unlink(missing_ok=True)
    with lock.ObjectLock(object_path(f"{bucket.url}/_a.rankmill"), Path("a"), tmp_path):
        pass
    assert f"cannot delete {bucket.url}/_a.rankmill: no permission (Access Denied)" in caplog.text


@pytest.mark.parametrize(
    ("handler", "why"),
    [(_Whole, "sends files only as a whole"), (_Unknown, "does not say how long it is")],
)
def test_a_web_server_that_cannot_serve_parts_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handler: type[_Whole], why: str
) -> None:
    monkeypatch.setattr(reading, "_BLOCK_BYTES", 100)
    (tmp_path / "a.jsonl").write_bytes(lines(ROWS))
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(tmp_path))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/a.jsonl"
        with pytest.raises(InputError, match=f"{url}: the server {why}; download it first"):
            opened(url)
        server.shutdown()
