"""Files and batches, by OpenAI's own client and by hand: a real gateway, a real runner, a real worker."""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import os
import shutil
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import s3fs
from hypothesis import given
from hypothesis import strategies as st
from openai import BadRequestError, OpenAI

from rankmill import Client
from rankmill.extensions.batches import work
from rankmill.extensions.batches.folder import FilesFolder
from rankmill.extensions.batches.lines import read_requests
from rankmill.extensions.batches.order import BatchOrder
from rankmill.extensions.batches.records import BatchRecord
from rankmill.extensions.batches.routes import BatchPaths
from rankmill.extensions.batches.service import Batches, ExpiresAfter, NewBatch
from rankmill.extensions.batches.work import BATCHES
from rankmill.extensions.gateway.keys.api_keys import KeyStore
from rankmill.extensions.gateway.refusals import Refusal, WrongFile
from rankmill.extensions.gateway.scoring import ServedModel
from rankmill.extensions.runners.record import FileRun, new_file_run
from rankmill.extensions.runners.redis_keys import file_run
from rankmill.extensions.runners.store import open_store
from rankmill.extensions.runners.submitted import on_server
from rankmill.jobs.contract.errors import InputError, OutputError, RunFailed, SpecError
from rankmill.jobs.contract.file_request import FileOrder, FileRequest
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.protocol.accounts import read_accounts
from rankmill.jobs.runtime.settings import load_settings
from rankmill.score.score_file import with_inputs
from tests.conftest import ENVIRON, QUICK_LEASE, StartRunner, wait_for
from tests.extensions.runners.test_faults import kept_rows
from tests.harness.gateways import PAIR, Reply, Running, running_gateway
from tests.harness.held import Held
from tests.harness.preloaded import PreloadedProcess
from tests.harness.servers.buckets import Bucket
from tests.harness.servers.disks import small_disk
from tests.harness.servers.valkey import Server

QUERY, TEXTS = PAIR
ENDED = {"completed", "failed", "cancelled"}


@pytest.fixture(scope="module")
def gateway(shared_queue: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A gateway that keeps files, and a runner."""
    place = tmp_path_factory.mktemp("gateway")
    (place / "files").mkdir()
    files = {"RANKMILL_GATEWAY_FILES": str(place / "files"), "RANKMILL_GATEWAY_FILE_MIB": "1"}
    # scores that are the same in any company
    environ = {**files, "RANKMILL_PRECISION": "fp32", "RANKMILL_TENANT": "gateway"}
    own = {**QUICK_LEASE, "RANKMILL_METRICS_ADDRESS": "none"}
    log = place / "runner.log"
    with log.open("wb") as out:
        command = ["rankmill", "runner", "--redis", shared_queue.url]
        runner: Any = PreloadedProcess(command, cwd=place, stdout=out, stderr=out, env={**ENVIRON, **own})
    with running_gateway(shared_queue.url, place, "--model", "demo", environ=environ) as running:
        yield running
    runner.terminate()
    assert runner.wait(timeout=60) == 0
    assert "Traceback" not in log.read_text()


@pytest.fixture
def client(gateway: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="anything", max_retries=0) as client:
        yield client


def request(number: int, **body: Any) -> dict[str, Any]:
    usual = {"text_1": QUERY, "text_2": [*TEXTS, f"moon {number}"], "model": "demo"}
    return {"custom_id": f"q-{number}", "method": "POST", "url": "/v1/score", "body": {**usual, **body}}


def lines(*requests: dict[str, Any]) -> bytes:
    return "".join(json.dumps(each) + "\n" for each in requests).encode()


def upload(gateway: Running, name: str, content: bytes, **headers: str) -> Reply:
    """Upload a file as curl does."""
    mark = uuid.uuid4().hex
    parts = [
        f'--{mark}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'.encode(),
        f'--{mark}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'.encode(),
        content,
        f"\r\n--{mark}--\r\n".encode(),
    ]
    named = {"content_type": f"multipart/form-data; boundary={mark}", **headers}
    return gateway.post("/v1/files", b"".join(parts), **named)


def ended(gateway: Running, batch_id: str, **headers: str) -> dict[str, Any]:
    """A batch when it has ended."""
    found: list[dict[str, Any]] = []

    def has_ended() -> bool:
        found.append(gateway.get(f"/v1/batches/{batch_id}", **headers).json)
        return found[-1]["status"] in ENDED

    wait_for(has_ended)
    return found[-1]


def submitted(gateway: Running, name: str, content: bytes, **asked: Any) -> dict[str, Any]:
    """A new batch of a new file."""
    file = upload(gateway, name, content).json
    made = gateway.post("/v1/batches", {"input_file_id": file["id"], "endpoint": "/v1/score", **asked})
    assert made.status == 200, made.body
    found: dict[str, Any] = made.json
    return found


def test_openais_client_submits_a_batch_and_fetches_every_line_once(client: OpenAI, gateway: Running) -> None:
    good = [request(number) for number in range(40)]
    bad = [request(100, text_2=[]), request(101, text_2=None), request(102, truncate_prompt_tokens="x")]
    bad += [request(103, text_2=[TEXTS[0], "cheese " * 600])]
    content = lines(bad[0], *good[:20], *bad[1:], *good[20:])
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    assert client.files.retrieve(file.id).filename == "in.jsonl"
    submit: Any = client.batches.create  # OpenAI has no endpoint for scores
    batch_id = submit(
        input_file_id=file.id,
        endpoint="/v1/score",
        completion_window="24h",
        metadata={"for": "test"},
    ).id
    assert ended(gateway, batch_id)["errors"] is None
    batch: Any = client.batches.retrieve(batch_id)
    assert (batch.status, batch.metadata) == ("completed", {"for": "test"})
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (44, 40, 4)
    output = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    errors = [json.loads(line) for line in client.files.content(batch.error_file_id).text.splitlines()]
    assert [line["custom_id"] for line in output] == [line["custom_id"] for line in good]
    assert [line["custom_id"] for line in errors] == [line["custom_id"] for line in bad]
    assert len({line["id"] for line in output + errors}) == 44
    for line in (output[0], output[39]):
        body = good[output.index(line)]["body"]
        live = gateway.post("/v1/score", body).json
        wanted = [each["score"] for each in live["data"]]
        assert line["response"]["status_code"] == 200
        found = [each["score"] for each in line["response"]["body"]["data"]]
        assert found == pytest.approx(wanted, abs=1e-4)
        assert line["response"]["body"]["usage"] == live["usage"]  # also of pairs that other lines have, too
    for line in errors:
        assert line["response"]["status_code"] == 400
        assert line["response"]["body"]["error"]["message"]
    assert "608 tokens, and 512 are taken" in errors[-1]["response"]["body"]["error"]["message"]
    assert batch.id in [each.id for each in client.batches.list(limit=1)]
    known = {each.id for each in client.files.list()}
    assert {file.id, batch.output_file_id, batch.error_file_id} <= known
    assert client.files.delete(file.id).deleted
    assert gateway.get(f"/v1/files/{file.id}").status == 404


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("/cohere/v2/rerank", {"max_tokens_per_doc": 2}),
        ("/jina/v1/rerank", {}),
        ("/voyage/v1/rerank", {}),
        ("/infinity/rerank", {}),
        ("/v1/rerank", {}),
    ],
)
def test_an_answer_has_the_tokens_that_a_live_one_has(
    gateway: Running, path: str, options: dict[str, Any]
) -> None:
    texts = [TEXTS[0], *TEXTS]  # one pair twice
    body = {"query": QUERY, "documents": texts, "model": "demo", **options}
    made = submitted(gateway, "in.jsonl", lines({"custom_id": "a", "url": path, "body": body}), endpoint=path)
    batch = ended(gateway, made["id"])
    (answered,) = gateway.get(f"/v1/files/{batch['output_file_id']}/content").body.splitlines()
    found = json.loads(answered)["response"]["body"]
    live = gateway.post(path, body).json
    for name in ("usage", "meta"):
        assert found.get(name) == live.get(name)
    assert {"usage", "meta"} & found.keys()
    results = "results" if "results" in live else "data"
    for mine, theirs in zip(found[results], live[results], strict=True):
        assert mine["index"] == theirs["index"]
        assert mine["relevance_score"] == pytest.approx(theirs["relevance_score"], abs=1e-4)


def test_long_queries_are_written_in_parts_that_arrow_can_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A query is written with each passage, and a column of text has at most 2 GiB."""
    monkeypatch.setattr(work, "_CHARS", 10_000)
    (tmp_path / "in.jsonl").write_bytes(lines(request(1, text_1="moon " * 400, text_2=TEXTS * 20)))
    asked: dict[str, str | int | None] = {"long": "refuse"}
    details = BatchOrder(id="batch_s1", owner="", endpoint="/v1/score", model="demo", asked=asked, kept=1)
    files = FileRequest(inputs=(str(tmp_path / "in.jsonl"),), output=str(tmp_path / "output.jsonl"))
    order = FileOrder(request=files, spec=ScoreSpec(model="demo"), **details.of_order())
    store, score = Mock(), Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        work.BatchWork(new_file_run(order, "s1"), store, score, Mock()).do()
    pairs = pq.ParquetFile(tmp_path / "pairs.parquet")
    assert pairs.metadata.num_rows == 40
    assert max(pairs.metadata.row_group(at).num_rows for at in range(pairs.num_row_groups)) == 5


def test_a_batch_that_is_continued_has_the_tokens_of_all_rows(
    held: Held, runners: StartRunner, tmp_path: Path
) -> None:
    (tmp_path / "files").mkdir()
    environ = {"RANKMILL_FILE_QUEUE": "counted", "RANKMILL_GATEWAY_FILES": str(tmp_path / "files")}
    environ |= {"RANKMILL_CHUNK_SIZE": "4", "RANKMILL_PRECISION": "fp32"}
    small = {"RANKMILL_WINDOW": "2"}
    server, model = held.server, {"model": str(held.model)}
    with running_gateway(server.url, tmp_path, "--model", str(held.model), environ=environ) as gateway:
        asked = [request(n, text_2=[*TEXTS, "moon " * (n % 9), "moon " * n], **model) for n in range(100)]
        stops = request(1000, text_2=["hold"], **model)
        made = submitted(gateway, "in.jsonl", lines(*asked[:60], stops, *asked[60:]))
        scored = tmp_path / "files" / made["id"] / "scored.parquet"
        first = runners(server, "--file-queue", "counted", environ=small)
        client = Client(server.url)
        run = on_server(client.store, client.settings).handle(made["id"].removeprefix("batch_"))
        wait_for(lambda: run.status().progress.rows > 100, first)
        first.kill()
        first.wait()
        kept = kept_rows(scored)
        assert 0 < kept < 400
        held.go()
        runners(server, "--file-queue", "counted", environ=small)
        batch = ended(gateway, made["id"])
        assert batch["request_counts"]["completed"] == len(asked) + 1
        outcome = run.status().outcome
        assert outcome
        assert outcome.resumed_rows > 100
        answers = gateway.get(f"/v1/files/{batch['output_file_id']}/content").body.splitlines()
        found = [json.loads(line)["response"]["body"]["usage"]["total_tokens"] for line in answers]
        del found[60]
        for place in (0, 1, 60, 99):
            live = gateway.post("/v1/score", asked[place]["body"]).json["usage"]["total_tokens"]
            assert found[place] == live
        growth = [found[n + 9] - found[n] for n in range(100 - 9)]
        assert growth == [9] * len(growth)  # one token for each word more


def test_a_file_of_pairs_becomes_the_scored_file(gateway: Running, shared_queue: Server) -> None:
    def counted() -> int:
        return sum(entry.amounts.pairs for entry in read_accounts(shared_queue.client, 2, "gateway"))

    before = counted()
    rows = pa.table({"id": range(300), "q": [QUERY] * 300, "passage": [f"moon {n}" for n in range(300)]})
    rows = rows.set_column(2, "passage", pa.array([None, *rows["passage"].to_pylist()[1:]], pa.string()))
    written = io.BytesIO()
    pq.write_table(rows, written)
    made = submitted(gateway, "pairs.parquet", written.getvalue(), model="demo", pairs={"query_column": "q"})
    with urllib.request.urlopen(f"{gateway.url}/v1/batches/{made['id']}/events", timeout=120) as stream:
        events = stream.read().decode().strip().split("\n\n")
    *begun, last = [event.splitlines() for event in events]
    assert {event[0] for event in begun} <= {"event: batch"}
    assert last[0] == "event: done"
    batch = json.loads(last[1].removeprefix("data: "))
    assert batch["status"] == "completed", batch
    assert batch["request_counts"] == {"total": 300, "completed": 299, "failed": 1}
    wait_for(lambda: counted() - before == 299)  # a gateway without keys is itself the tenant
    content = gateway.get(f"/v1/files/{batch['output_file_id']}/content")
    assert int(content.headers["content-length"]) == len(content.body)
    scored = pq.read_table(io.BytesIO(content.body))
    assert scored["id"].to_pylist() == list(range(300))
    alone = {"queries": QUERY, "documents": "moon 7", "model": "demo"}
    assert scored["score"][7].as_py() == pytest.approx(
        gateway.post("/v1/score", alone).json["data"][0]["score"], abs=1e-4
    )
    (error,) = gateway.get(f"/v1/files/{batch['error_file_id']}/content").body.splitlines()
    assert json.loads(error) == {"row": 0, "error": "passage is null", "attempts": 1}


@pytest.mark.parametrize(
    ("content", "asked", "reason"),
    [
        (
            b"q,p\nmoon,a moon\n",
            {},
            "the file: no column 'query'; it has 'q', 'p' (choose with pairs.query_",
        ),
        (b'query,passage\nmoon,"a moon\n', {}, "the file, line 2: the field in quotes"),
        (
            b"query,passage\nmoon,a moon\n",
            {"pairs": {"score_column": "passage"}},
            "has a column 'passage' already; name the new one with pairs.score_column",
        ),
    ],
)
def test_a_batch_that_fails_says_nothing_of_where_its_files_lie(
    gateway: Running, content: bytes, asked: dict[str, Any], reason: str
) -> None:
    batch = ended(gateway, submitted(gateway, "pairs.csv", content, **asked)["id"])
    assert batch["status"] == "failed"
    message = batch["errors"]["data"][0]["message"]
    assert reason in message
    assert "/" not in message
    assert "rankmill" not in message


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("in.jsonl", b"", "the file is empty"),
        ("in.jsonl", b"\xef\xbb\xbf \n\n", "the file is empty: send one with a line"),
        ("in.csv", b"", "the file is empty"),
        ("in.jsonl", b"\nrequests of May\n" + lines(request(1)), "line 2: not JSON that can be read: "),
        ("in.jsonl", b"\xff\xfe{\x00}\x00\n", "line 1: not JSON that can be read: "),
        ("in.jsonl", b'["moon", "a moon"]\n', "line 1: neither a request nor a pair"),
        ("in.jsonl", lines({"custom_id": "a", "body": request(1)["body"]}), "line 1: url: Field required"),
        ("in.jsonl", lines({"custom_id": "a", "method": "POST", "url": "/v1/score"}), "line 1: body: "),
        ("in.jsonl", lines({"body": request(1)["body"]}), "line 1: custom_id: Field required"),
        ("in.jsonl", b'{"custom_id": "b", "x": NaN}', "line 1: not JSON that can be read: "),
    ],
)
def test_a_file_that_is_no_batch_is_refused_at_once(
    gateway: Running, name: str, content: bytes, reason: str
) -> None:
    file = upload(gateway, name, content).json
    refused = gateway.post("/v1/batches", {"input_file_id": file["id"], "endpoint": "/v1/score"})
    assert refused.status == 400, refused.body
    assert refused.json["message"].startswith(reason)


def test_a_byte_order_mark_is_no_part_of_the_first_request(gateway: Running) -> None:
    made = submitted(gateway, "in.jsonl", b"\xef\xbb\xbf" + lines(request(1), request(2)))
    batch = ended(gateway, made["id"])
    assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
    answers = gateway.get(f"/v1/files/{batch['output_file_id']}/content").body.splitlines()
    assert [json.loads(line)["custom_id"] for line in answers] == ["q-1", "q-2"]


def test_pairs_with_fields_of_requests_are_pairs(gateway: Running) -> None:
    rows = lines({"url": "https://a.example", "body": "a moon", "query": QUERY, "custom_id": 7})
    with pytest.raises(AssertionError, match="line 1: "):  # it may be either, and what is meant is asked for
        submitted(gateway, "in.jsonl", rows)
    rows = lines({"url": "https://a.example", "body": "a moon", "query": QUERY})
    batch = ended(gateway, submitted(gateway, "in.jsonl", rows, pairs={"passage_column": "body"})["id"])
    assert (batch["status"], batch["request_counts"]["completed"]) == ("completed", 1)


def test_pairs_without_a_header_are_scored_by_the_names_that_are_given(gateway: Running) -> None:
    rows = f"7;{QUERY};a moon\n8;{QUERY};a river\n".encode()
    pairs = {"columns": ["qid", "query", "passage"], "delimiter": "semicolon"}
    batch = ended(gateway, submitted(gateway, "top1000.csv", rows, pairs=pairs)["id"])
    header, *scored = gateway.get(f"/v1/files/{batch['output_file_id']}/content").body.decode().splitlines()
    assert header.split(",")[:3] == ["qid", "query", "passage"]
    assert [line.split(",")[0] for line in scored] == ["7", "8"]


@pytest.mark.parametrize(
    ("pairs", "kind"), [({"text_column": "a"}, "texts"), ({"messages_column": ["a"]}, "conversations")]
)
def test_the_gateway_s_settings_for_pairs_are_not_for_texts(
    pairs: dict[str, Any], kind: str, server: Server, tmp_path: Path
) -> None:
    of_pairs = {"instruction": "Judge.", "prompt_template": "qwen3-reranker", "max_passage_tokens": 5}
    others = {"long": "split", "truncation_side": "left", "weight": 3}
    settings = load_settings({"gateway_files": str(tmp_path), **of_pairs, **others})
    batches = Batches(settings, server.url)
    file = batches.upload(None, "a.csv", io.BytesIO(b"a\nmoon\n"), 7)
    asked = NewBatch.model_validate({"input_file_id": file.id, "pairs": pairs})
    made = batches.create(None, asked, lambda name: ServedModel("demo", "demo"))
    run = batches.find(BatchRecord, None, made["id"]).run
    order = open_store(server.client, settings).load(run).order
    assert order.weight == 3
    taken = with_inputs(order.request, settings.model_copy(update=order.spec.model_dump()))
    assert (taken.inputs, taken.instruction, taken.prompt_template, taken.max_passage_tokens) == (
        kind, None, None, None
    )  # fmt: skip
    sides = {"texts": ("split", "left"), "conversations": ("truncate", None)}
    assert (taken.long, taken.truncation_side) == sides[kind]


def test_files_are_kept_for_as_long_as_was_asked(client: OpenAI, gateway: Running) -> None:
    after: Any = {"anchor": "created_at", "seconds": 3600}
    content = ("in.jsonl", lines(request(1)))
    file = client.files.create(file=content, purpose="batch", expires_after=after)
    assert file.expires_at == file.created_at + 3600
    submit: Any = client.batches.create
    asked = {"input_file_id": file.id, "endpoint": "/v1/score", "completion_window": "24h"}
    made = submit(**asked, output_expires_after=after)
    output = client.files.retrieve(ended(gateway, made.id)["output_file_id"])
    assert output.expires_at == output.created_at + 3600
    for wrong in ({"anchor": "last_used_at", "seconds": 3600}, {"anchor": "created_at", "seconds": 60}):
        with pytest.raises(BadRequestError, match="expires_after"):
            client.files.create(file=content, purpose="batch", expires_after=wrong)  # type: ignore[arg-type]
        with pytest.raises(BadRequestError, match="output_expires_after"):
            submit(**asked, output_expires_after=wrong)
    month: Any = {"anchor": "created_at", "seconds": 30 * 86400}
    with pytest.raises(BadRequestError, match="files are kept for at most 604,800 s here"):
        client.files.create(file=content, purpose="batch", expires_after=month)


def test_a_file_that_expires_early_is_kept_while_a_batch_reads_it(server: Server, tmp_path: Path) -> None:
    batches = Batches(load_settings({"gateway_files": str(tmp_path), "model": "demo"}), server.url)
    hour = ExpiresAfter(anchor="created_at", seconds=3600)
    csv = b"query,passage\nmoon,a moon\n"
    first, second = (batches.upload(None, "a.csv", io.BytesIO(csv), len(csv), hour) for _ in range(2))
    asked = NewBatch.model_validate({"input_file_id": first.id})
    batches.create(None, asked, lambda name: ServedModel("demo", "demo"))
    for file in (first, second):
        os.utime(tmp_path / file.id, (0, (tmp_path / file.id).stat().st_mtime - 3601))  # an hour goes by
        server.client.delete(f"rankmill:gateway-file:{file.id}")
    batches.sweep()
    assert (tmp_path / first.id).is_dir()
    assert not (tmp_path / second.id).exists()
    third = batches.upload(None, "a.csv", io.BytesIO(csv), len(csv))
    os.utime(tmp_path / third.id, (0, (tmp_path / third.id).stat().st_mtime - 3601))
    server.client.delete(f"rankmill:gateway-file:{third.id}")  # the server has lost it
    batches.sweep()
    assert (tmp_path / third.id).is_dir()


def test_a_file_that_a_batch_reads_is_not_deleted_before_the_batch_ends(
    server: Server, tmp_path: Path
) -> None:
    batches = Batches(load_settings({"gateway_files": str(tmp_path), "model": "demo"}), server.url)
    csv = b"query,passage\nmoon,a moon\n"
    read, other = (batches.upload(None, "a.csv", io.BytesIO(csv), len(csv)) for _ in range(2))
    asked = NewBatch.model_validate({"input_file_id": read.id})
    batch = batches.create(None, asked, lambda name: ServedModel("demo", "demo"))["id"]
    with pytest.raises(Refusal, match=f"{batch} reads the file: wait for its end, or cancel it") as refused:
        batches.delete(None, read.id)
    assert refused.value.kind == "conflict"
    assert (tmp_path / read.place).read_bytes() == csv
    batches.delete(None, other.id)
    batches.cancel(None, batch)
    batches.delete(None, read.id)
    assert not (tmp_path / read.id).exists()


def test_the_records_of_batches_are_renewed_before_they_expire(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a file_run_ttl of an hour or less, a batch expired while a runner scored it."""
    settings = load_settings({"gateway_files": str(tmp_path), "file_run_ttl": 600})
    paths, pauses = BatchPaths(settings), list[float]()
    paths.attach(Mock(redis_url=server.url))

    async def end(seconds: float) -> None:
        pauses.append(seconds)
        raise asyncio.CancelledError

    monkeypatch.setattr(asyncio, "sleep", end)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(paths.work())
    assert pauses == [300]


def test_a_batch_does_not_expire_before_its_end(server: Server, tmp_path: Path) -> None:
    batches = Batches(load_settings({"gateway_files": str(tmp_path), "model": "demo"}), server.url)
    csv = b"query,passage\nmoon,a moon\n"
    file = batches.upload(None, "a.csv", io.BytesIO(csv), len(csv))
    asked = NewBatch.model_validate({"input_file_id": file.id})
    going_on, over = (
        batches.create(None, asked, lambda name: ServedModel("demo", "demo"))["id"] for _ in range(2)
    )
    batches.cancel(None, over)
    client: Any = server.client
    for key in client.scan_iter("rankmill:batch*"):
        client.expire(key, 3600)  # the last hour of their week
    batches.sweep()
    assert client.ttl(f"rankmill:batch:{over}") <= 3600
    for key in (f"rankmill:batch:{going_on}", "rankmill:batches:", "rankmill:batches:*"):
        assert client.ttl(key) > 3600


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (
            RunFailed("no worker of queue 'q' can score it: host-7.1234: no memory"),
            "the workers cannot score",
        ),
        (SpecError("cannot load the model in /srv/models/private: damaged"), "the workers cannot score"),
        (InputError("/srv/files/file-1/content.csv: no column 'query'"), "the file: no column 'query'"),
        (InputError("/srv/files/batch_1/output.csv: another name"), "the output: another name"),
        (InputError("/etc/other: cannot be read"), "it cannot be done here now"),
        (KeyError("/srv/secret"), "it cannot be done here now"),
        (WrongFile("line 2: the line for POST /v1/score"), "line 2: the line for POST /v1/score"),
    ],
)
def test_why_a_batch_has_failed_is_told_without_what_is_the_operator_s(error: Exception, shown: str) -> None:
    request = FileRequest(inputs=("/srv/files/file-1/content.csv",), output="/srv/files/batch_1/output.csv")
    order = FileOrder(request=request, spec=ScoreSpec(model="/srv/models/private"))
    found = BATCHES.why_failed(error, order)
    assert found.startswith(shown)
    assert "/srv" not in found
    assert "host-7" not in found


@pytest.mark.parametrize(
    ("content", "reason", "line"),
    [
        (lines(request(1), request(2), request(1)), "its custom_id is that of line 1", 3),
        (lines(request(1), {**request(2), "url": "/rerank"}), "the batch is for POST /v1/score", 2),
        (lines(request(1)) + b'{"custom_id": "a"}\n', "a line has custom_id, method, url and body", 2),
        (lines(request(1)) + b"[1]\n", "neither a request nor a pair, which are JSON objects", 2),
        (lines(request(1)) + b"{bad\n", "not JSON that can be read: key must be a string at column 2", 2),
        (lines(request(1), request(2, use_activation=False)), "its options are not those", 2),
        (lines(request(1), request(2, truncate_prompt_tokens=-1)), "its options are not those", 2),
        (lines(request(1, truncate_prompt_tokens=-1), request(2)), "its options are not those", 2),
    ],
)
def test_a_line_that_belongs_to_no_batch_fails_it(
    gateway: Running, content: bytes, reason: str, line: int
) -> None:
    batch = ended(gateway, submitted(gateway, "in.jsonl", content)["id"])
    (error,) = batch["errors"]["data"]
    assert (batch["status"], error["line"], batch["output_file_id"]) == ("failed", line, None)
    assert reason in error["message"]


def test_what_cannot_be_a_batch_is_refused(gateway: Running) -> None:
    file_id = upload(gateway, "in.jsonl", lines(request(1))).json["id"]
    big = upload(gateway, "big.jsonl", lines(request(1, model="big"))).json["id"]
    rows = upload(gateway, "rows.csv", b"query,text\nmoon,a moon\n").json["id"]
    gone = [upload(gateway, name, lines(request(1))).json["id"] for name in ("in.jsonl", "in.csv")]
    for file in gone:  # as a rule of an object store does with old objects
        shutil.rmtree(gateway.log.parent / "files" / file)
    both = {"input_file_id": rows, "pairs": {"query_column": "q", "text_column": "text"}}
    told = gateway.post("/v1/batches", both)
    assert told.json["message"] == "pairs.query_column is for pairs: leave it out, or pairs.text_column"
    mixed = gateway.post("/v1/batches", {"input_file_id": rows, "pairs": {"delimiter": "ab"}})
    assert mixed.json["message"].startswith("pairs.delimiter: 'ab' is not one character")
    of_rows = gateway.post("/v1/batches", {"input_file_id": file_id, "model": "demo"})
    assert of_rows.json["message"].startswith("pairs: model and pairs are for a file of rows")
    refusals = [
        (told, 400),
        (mixed, 400),
        (of_rows, 400),
        (gateway.post("/v1/batches", {"input_file_id": file_id, "endpoint": "/v1/chat"}), 400),
        (gateway.post("/v1/batches", {"input_file_id": "file-none", "endpoint": "/v1/score"}), 404),
        (gateway.post("/v1/batches", {"input_file_id": big, "endpoint": "/v1/score"}), 404),
        (gateway.post("/v1/batches", {"input_file_id": file_id, "endpoint": "/v1/rerank"}), 400),
        (gateway.post("/v1/batches", {"input_file_id": file_id, "pairs": {"top_k": 0}}), 400),
        (gateway.post("/v1/batches", {"input_file_id": file_id, "completion_window": "1h"}), 400),
        *(
            (gateway.post("/v1/batches", {"input_file_id": file, "endpoint": "/v1/score"}), 404)
            for file in gone
        ),
        (gateway.get("/v1/batches/batch_none"), 404),
        (gateway.get("/v1/files/..%2F..%2Fetc%2Fpasswd/content"), 404),
        (gateway.get("/v1/batches?limit=0"), 400),
        (upload(gateway, "in.exe", b"x"), 400),
        (gateway.post("/v1/files", b"no form", content_type="multipart/form-data; boundary=x"), 400),
        (gateway.post("/v1/files", {}), 415),
    ]
    for reply, status in refusals:
        assert reply.status == status, reply.body
    limit = gateway.get("/v1/batches?limit=101").json["error"]
    assert (limit["param"], limit["message"].startswith("limit: ")) == ("limit", True)
    line = http.client.HTTPConnection(urlsplit(gateway.url).netloc)
    with closing(line):  # nothing of a file that is too large is read, so nothing is sent
        kind = {"content-type": "multipart/form-data; boundary=x", "content-length": str(3 << 20)}
        line.request("POST", "/v1/files", headers=kind)
        assert line.getresponse().status == 413


def test_a_batch_can_be_cancelled(gateway: Running) -> None:
    many = pa.table({"query": [QUERY] * 20_000, "passage": [f"moon {n}" for n in range(20_000)]})
    written = io.BytesIO()
    pq.write_table(many, written)
    made = submitted(gateway, "pairs.parquet", written.getvalue())
    cancelled = gateway.post(f"/v1/batches/{made['id']}/cancel", {})
    assert cancelled.json["status"] in {"cancelling", "cancelled"}
    assert ended(gateway, made["id"])["status"] == "cancelled"


def test_a_batch_that_is_cancelled_while_it_is_shown_is_not_shown_as_going_on(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load_settings({"gateway_files": str(tmp_path), "model": "demo"})
    batches = Batches(settings, server.url)
    csv = b"query,passage\nmoon,a moon\n"
    file = batches.upload(None, "a.csv", io.BytesIO(csv), len(csv))
    asked = NewBatch.model_validate({"input_file_id": file.id})
    batch = batches.create(None, asked, lambda name: ServedModel("demo", "demo"))["id"]
    runs = open_store(server.client, settings)
    held = runs.claim(60)
    assert held
    assert batches.cancel(None, batch)["status"] == "cancelling"
    load = runs.load

    def and_end(run_id: str) -> FileRun:
        run = load(run_id)
        runs.end(replace(held, run=run.end("cancelled")))
        return run

    monkeypatch.setattr(batches._runs, "load", and_end)
    record = batches.find(BatchRecord, None, batch)
    assert [batches.view(record)["status"] for _ in range(2)] == ["cancelling", "cancelled"]


def test_a_batch_whose_run_the_server_has_lost_is_expired(gateway: Running, shared_queue: Server) -> None:
    """As after a submit that a full server has refused; the list has the others still."""
    lost, kept = (submitted(gateway, "in.jsonl", lines(request(1)))["id"] for _ in range(2))
    run = ended(gateway, lost)["id"].removeprefix("batch_")
    assert shared_queue.client.delete(file_run(run)) == 1
    states = {each["id"]: each["status"] for each in gateway.get("/v1/batches").json["data"]}
    assert states[lost] == "expired"
    assert kept in states
    assert gateway.post(f"/v1/batches/{lost}/cancel", {}).json["status"] == "expired"
    assert gateway.get(f"/v1/batches/{lost}/events").body.startswith(b"event: done")
    ended(gateway, kept)


def test_files_and_batches_belong_to_the_keys_of_a_name(gateway: Running, shared_queue: Server) -> None:
    store = KeyStore(shared_queue.client)
    mine, again, other, admin = (
        {"x_api_key": store.create(name, days=1, admin=name == "batch-admin")[0]}
        for name in ("batch-mine", "batch-mine", "batch-other", "batch-admin")
    )
    limited = {"x_api_key": store.create("batch-other", days=1, models=("else",))[0]}
    try:
        file_id = upload(gateway, "in.jsonl", lines(request(1)), **mine).json["id"]
        body = {"input_file_id": file_id, "endpoint": "/v1/score"}
        batch_id = gateway.post("/v1/batches", body, **again).json["id"]
        seen = {path: path.rpartition("/")[2] for path in (f"/v1/files/{file_id}", f"/v1/batches/{batch_id}")}
        for path in seen:
            known = [gateway.get(path, **_named(key)).status for key in (mine, again, other, admin)]
            assert known == [200, 200, 404, 200]
            assert gateway.get(path).status == 401
        for listing, wanted in (("/v1/files", file_id), ("/v1/batches", batch_id)):
            ids = [
                [each["id"] for each in gateway.get(listing, **_named(key)).json["data"]]
                for key in (again, other, admin)
            ]
            assert [wanted in each for each in ids] == [True, False, True]
        assert gateway.post("/v1/batches", body, **other).status == 404
        theirs = upload(gateway, "in.jsonl", lines(request(1)), **limited).json["id"]
        assert gateway.post("/v1/batches", {**body, "input_file_id": theirs}, **limited).status == 403
        ended(gateway, batch_id, **_named(mine))
    finally:
        store.revoke(["batch-mine", "batch-other", "batch-admin"])


def _named(key: dict[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): text for name, text in key.items()}


def test_files_lie_in_an_object_store(
    shared_queue: Server,
    bucket: Bucket,
    s3_store: s3fs.S3FileSystem,
    runners: StartRunner,
    tmp_path: Path,
) -> None:
    environ = {**bucket.environ, "RANKMILL_GATEWAY_FILES": f"{bucket.url}/batches"}
    files = f"{bucket.url}/batches"
    own = ["--file-queue", "object-store", "--read", files, "--write", files]
    runners(shared_queue, *own, environ=bucket.environ)
    environ["RANKMILL_FILE_QUEUE"] = "object-store"
    with running_gateway(shared_queue.url, tmp_path, "--model", "demo", environ=environ) as gateway:
        asked = [request(number) for number in range(5)]
        bad = {**request(5), "body": {"text_1": QUERY, "text_2": []}}
        made = submitted(gateway, "in.jsonl", lines(*asked, bad))
        table = submitted(gateway, "in.csv", b"query,passage\nmoon,a moon\nmoon,cheese\n")
        found = ended(gateway, made["id"])
        assert (found["status"], found["request_counts"]["completed"]) == ("completed", 5), found
        answers = gateway.get(f"/v1/files/{found['output_file_id']}/content").body.splitlines()
        assert [json.loads(line)["custom_id"] for line in answers] == [f"q-{number}" for number in range(5)]
        (wrong,) = gateway.get(f"/v1/files/{found['error_file_id']}/content").body.splitlines()
        assert json.loads(wrong)["custom_id"] == "q-5"
        scored = ended(gateway, table["id"])["output_file_id"]
        assert gateway.get(f"/v1/files/{scored}/content").body.startswith(b"query,passage,score")
        asked_delete = urllib.request.Request(f"{gateway.url}/v1/files/{scored}", method="DELETE")
        assert gateway.send(asked_delete).json["deleted"] is True
        left = s3_store.find(f"{bucket.url}/batches")
        assert not [path for path in left if path.endswith("output.csv")]
        (kept,) = [path for path in left if path.endswith("output.jsonl")]
        s3_store.rm(kept)  # as a rule of the store does with old objects
        reply = gateway.get(f"/v1/files/{found['output_file_id']}/content")
        assert (reply.status, b"are gone" in reply.body) == (404, True), reply.body


def test_only_what_is_old_and_forgotten_is_swept_away(tmp_path: Path) -> None:
    for name in ("file-old", "batch_old", "file-known", "file-new", "somebody-else's"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "content.csv").write_text("a,b\n")
        if "new" not in name:
            os.utime(tmp_path / name, (0, 0))
    FilesFolder(str(tmp_path)).sweep(lambda name: name == "file-known", seconds=3600)
    assert {path.name for path in tmp_path.iterdir()} == {"file-known", "file-new", "somebody-else's"}


def test_an_upload_for_which_there_is_no_room_is_refused(server: Server, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    with small_disk(tmp_path / "disk", "64k") as disk:
        environ = {"RANKMILL_GATEWAY_FILES": str(tmp_path / "files"), "TMPDIR": str(disk)}
        with running_gateway(server.url, tmp_path, "--model", "demo", environ=environ) as gateway:
            refused = upload(gateway, "a.jsonl", b"x" * (2 << 20))
            told = gateway.log.read_text()
    assert (refused.status, "it cannot be done here now" in str(refused.json)) == (503, True)
    assert "the folder of temporary files: No space left on device" in told
    assert "Traceback" not in told


def test_a_file_for_which_no_folder_can_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file-1").touch()
    with pytest.raises(OutputError, match=r"^the file cannot be kept: File exists$"):
        FilesFolder(str(tmp_path)).save(io.BytesIO(b"x"), "file-1/content.csv")


def test_the_files_of_a_name_have_a_limit(server: Server, tmp_path: Path) -> None:
    settings = load_settings({"gateway_files": str(tmp_path), "gateway_files_gib": 1e-6})
    known = Batches(settings, server.url)
    first = known.upload(None, "a.csv", io.BytesIO(b"x" * 1000), 1000)
    with pytest.raises(Refusal, match="delete some"):
        known.upload(None, "b.csv", io.BytesIO(b"x" * 1000), 1000)
    known.delete(None, first.id)
    assert not list(tmp_path.iterdir())
    known.delete(None, known.upload(None, "b.csv", io.BytesIO(b"x" * 1000), 1000).id)


A_LINE = st.one_of(st.binary(max_size=60), st.sampled_from([lines(request(n))[:-1] for n in range(3)]))


@given(st.lists(A_LINE))
def test_any_file_is_read_or_refused_by_line(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes]
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(b"\n".join(parts))
    found: list[str] = []
    reason = ""
    try:
        found += [each.line.custom_id for each in read_requests(path, "/v1/score")]
    except InputError as error:
        reason = str(error)
    assert reason.startswith("line ") if reason else len(found) == len(set(found))
