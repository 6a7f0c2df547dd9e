"""Messages as the release before has written them: this release reads them, and writes the same fields.

They were recorded from commit 77483eb. A worker or producer of that release refuses a field that it does not
know, so a message that needs none of what was added since must have the same fields.
"""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any, cast

import pyarrow as pa
import pytest
from rq.job import Job

from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import WireError
from rankmill.jobs.contract.job import (
    Payload,
    asks_for_row_tokens,
    asks_for_times,
    read_format,
)
from rankmill.jobs.contract.results import ChunkFailure, ChunkScores, from_entry, to_entry
from rankmill.jobs.contract.run import read_run
from rankmill.jobs.contract.wire import decode_pairs, encode_pairs, encode_texts
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.protocol.set_aside import read_job
from rankmill.jobs.protocol.submitted.record import FileRun
from rankmill.jobs.protocol.submitted.request import FileOrder
from tests.conftest import Server

RUN_ID = "r00000000000000000000000000000001"
RUN = {
    b"format": b"2",
    b"spec": b'{"model": "demo", "revision": null, "precision": "auto", '
    b'"max_length": null, "activation": "default"}',
    b"queue": b"q",
    b"ttl": b"100",
    b"max_retries": b"2",
    b"created": b"1795374000.5",
    b"rows": b"3",
}
PAIRS = base64.b64decode(
    b"UktNTAAAAAIAAAAAAAACoCi1L/1goAEVCAASDSAjsCfNAQwDRBqFBgM42iYmwkbME0xwiqqojRwPaQO5yZZ7yxS/bQbP"
    b"DxSJHAFMZymUIAgCCVFAbBvjCCGI4MvqXNJ0XM2HbXt0pbqqlarOoLBYYDwB+MCbJuNktjlcHDyNxpNw5XfOJGhVJqpN"
    b"84IfT9sanib0SzWZuC6fecS2BT4gsIIRI+vnqMM8bczuzmZBvi0kVjRw6oJ8Z1aWiYD5ZnaW+chMI80t45nINNlabYMs"
    b"hhyNZeootrxMCxFChxpMELApg6AQulcnfveuqWs1vWFMa1en4wFoP22GiOtasssmXnU3KwbbQ3Jn6tvQIOrHyMWdEptX"
    b"hmcFnKzZsj0="
)
JOB = {
    b"status": b"queued",
    b"created_at": b"2026-11-22T19:00:00.000000Z",
    b"data": b"x\x9c\x8bV\xca\xcaO*\xd6+N\xce/J\x8dO\xce(\xcd\xcbV\xd2Q\xc8+"
    b"\xcd\xc9\xd1Q\x88V*2\xc0\x0f\x0c\x81j\rbu\x14\xaakc\x01\x02\xe5\x12\xef",
    b"success_callback_name": b"",
    b"failure_callback_name": b"",
    b"stopped_callback_name": b"",
    b"started_at": b"",
    b"ended_at": b"",
    b"last_heartbeat": b"",
    b"worker_name": b"",
    b"group_id": b"",
    b"retries_left": b"2",
    b"retry_intervals": b"[1, 4]",
    b"origin": b"q",
    b"description": b"jobs.score_chunk('r00000000000000000000000000000001', 0)",
    b"enqueued_at": b"2026-11-22T19:00:00.000000Z",
    b"timeout": b"906",
    b"result_ttl": b"0",
    b"failure_ttl": b"100",
    b"meta": b'{"suspect": false}',
    b"ttl": b"100",
}
STATS = (
    b'{"worker":"w","device":"cpu","backend":"torch","precision":"fp32","revision":null,'
    b'"attempt":1,"tokens":10,"padded_tokens":12,"batches":1,"seconds":0.5,"int8_gain":null}'
)
SCORES = base64.b64decode(
    b"UktNTAAAAAIAAAAAAAABwCi1L/1gwABNBgCyihsisCfNAQwDgCiSLEnqMAspdQMTcShKQMBrH7zcUBIppdwyBX93t4CQ"
    b"YBq84GFkFMMcyAosk6takJlhTQiePOYCuEYOcXeXUkVbKDSYwhJTFclOW7SmOPqAM1S+u4iDG5+r6uspf1TRdD0+u8Pd"
    b"XSwg4AKpqg40MY98zjySJchA8pE5a7XGZhQCMLCBDXxgBj6wgT9QB38s57g1C4LT2wcrBFPMNQNC7jJrtyano3LBhaW5"
    b"85f5p3jPsWwi1xPavpv7lzOLK8o="
)
FAILURE = {
    b"chunk": b"0",
    b"failure": b"broken",
    b"fatal": b"0",
    b"attempts": b"1",
    b"worker": b"",
    b"died": b"0",
}
FILE_RUN = (
    '{"format": 2, "id": "s0000000000000000000000000000000", "order": {"request": {"inputs": '
    '["/a.parquet"], "output": "/b.parquet", "run": null, "queries": [], "corpus": [], "depth": null, '
    '"qrels": null, "with_texts": false, "output_format": null, "top_k": null, "tag": "rankmill", '
    '"query_column": "query", "passage_column": "passage", "score_column": "score", "rank_column": '
    '"rank", "query_id_column": null, "passage_id_column": null, "text_columns": [], "list_columns": [], '
    '"delimiter": null, "limit": null, "shard": null, "rows_per_part": null, "reuse": null, "on_null": '
    '"error", "force": false, "restart": false}, "spec": {"model": "demo", "revision": null, "precision":'
    ' "auto", "max_length": null, "activation": "default", "instruction": null, "prompt_template": null, '
    '"label": null, "long": "truncate", "long_stride": null}, "queue": "q", "chunk_size": 8, "webhook": '
    'null}, "created": 1795374000.5, "state": "waiting", "reason": "", "runner": "", "started": null, '
    '"ended": null, "deaths": 0, "rows": null, "begun_rows": 0, "progress": {"rows": 0, "row_errors": 0, '
    '"since": 0.0, "since_rows": 0, "at": 0.0}, "seal": null, "restarted": false, "outcome": null, '
    '"notice": null}'
)


def test_this_release_reads_them() -> None:
    run = read_run(RUN_ID, RUN)
    assert (run.spec.model, run.spec.precision, run.rows, run.priority) == ("demo", "auto", 3, "request")
    assert decode_pairs(PAIRS) == (["q", "q", None], ["a", "b", ""])
    result = from_entry({b"chunk": b"0", b"scores": SCORES, b"stats": STATS})
    assert isinstance(result, ChunkScores)
    assert result.scores.to_pylist() == [1.5, None, 2.0]
    assert result.errors.to_pylist() == [None, "bad", None]
    assert (result.stats.worker, result.stats.tokens, result.stats.int8_gain) == ("w", 10, None)
    assert from_entry(FAILURE) == ChunkFailure(chunk=0, message="broken", fatal=False)


def test_this_release_writes_the_same_fields(server: Server) -> None:
    store = RunStore(server.client)
    run = read_run(RUN_ID, RUN)
    pairs = encode_pairs(pa.array(["q", "q", None]), pa.array(["a", "b", ""]))
    store.enqueue(run, {0: Payload(pairs, 3)}, new=True)
    assert server.client.hgetall(keys.run(RUN_ID)) == RUN
    assert pairs[:16] == PAIRS[:16]  # magic, format, size before compression
    assert server.client.hgetall(f"rq:job:{keys.job_id(RUN_ID, 0)}").keys() == JOB.keys()
    result = from_entry({b"chunk": b"0", b"scores": SCORES, b"stats": STATS})
    written = to_entry(result)
    assert written.keys() == {"chunk", "scores", "stats"}
    assert json.loads(str(written["stats"])) == json.loads(STATS)
    failure = to_entry(ChunkFailure(chunk=0, message="broken", fatal=False))
    assert {name.encode(): str(value).encode() for name, value in failure.items()} == FAILURE


def test_what_does_not_fit_a_model_is_named_where_it_is_known() -> None:
    failure = ChunkFailure(chunk=0, message="too long", fatal=True, option="max_length")
    entry = {name.encode(): str(value).encode() for name, value in to_entry(failure).items()}
    assert entry.keys() - FAILURE.keys() == {b"option"}
    assert from_entry(entry) == failure


def test_times_of_stages_are_written_only_for_who_asks(server: Server) -> None:
    store = RunStore(server.client)
    run, job_id = read_run(RUN_ID, RUN), keys.job_id(RUN_ID, 0)
    for times in (False, True):
        store.enqueue(run, {0: Payload(PAIRS, 3, times=times)}, new=True)
        job = read_job(store.queue("q"), job_id.encode())
        assert job is not None
        assert asks_for_times(job) == times
    assert server.client.hgetall(f"rq:job:{job_id}").keys() == JOB.keys()
    told = json.loads(STATS) | {"tokenize_seconds": 0.1, "forward_seconds": 0.3}
    result = from_entry({b"chunk": b"0", b"scores": SCORES, b"stats": json.dumps(told).encode()})
    assert isinstance(result, ChunkScores)
    assert json.loads(result.stats.written()) == told


def test_tokens_of_rows_are_written_only_for_who_asks(server: Server) -> None:
    store = RunStore(server.client)
    run, job_id = read_run(RUN_ID, RUN), keys.job_id(RUN_ID, 0)
    for asked in (False, True):
        store.enqueue(run, {0: Payload(PAIRS, 3, row_tokens=asked)}, new=True)
        job = read_job(store.queue("q"), job_id.encode())
        assert job is not None
        assert asks_for_row_tokens(job) == asked
    result = from_entry({b"chunk": b"0", b"scores": SCORES, b"stats": STATS})
    assert isinstance(result, ChunkScores)
    assert result.tokens is None
    counted = replace(result, tokens=pa.array([4, None, 5], pa.int32()))
    written = cast("bytes", to_entry(counted)["scores"])
    back = from_entry({b"chunk": b"0", b"scores": written, b"stats": STATS})
    assert isinstance(back, ChunkScores)
    assert back.tokens is not None
    assert back.tokens.to_pylist() == [4, None, 5]


def test_what_formats_2_and_3_cannot_say_is_optional(server: Server) -> None:
    store, job_id = RunStore(server.client), keys.job_id(RUN_ID, 0)
    plain = read_run(RUN_ID, RUN)
    assert (plain.weight, plain.inputs) == (1.0, "pairs")
    spec = plain.spec.model_copy(update={"inputs": "texts"})  # its text does not say it
    extended = plain.model_copy(update={"weight": 3.0, "inputs": "texts", "spec": spec})
    store.enqueue(extended, {0: Payload(encode_texts(pa.array(["a", None]), "texts"), 2)}, new=True)
    assert store.load(RUN_ID) == extended
    assert server.client.hget(keys.run(RUN_ID), "format") == b"5"  # so a release before names its own version
    job = read_job(store.queue("q"), job_id.encode())
    assert job is not None
    assert read_format(job) == 5
    told = json.loads(STATS) | {"digest": "0" * 64, "bound": 0.001, "reference": "own"}
    result = from_entry({b"chunk": b"0", b"scores": SCORES, b"stats": json.dumps(told).encode()})
    assert isinstance(result, ChunkScores)
    assert json.loads(result.stats.written()) == told


def test_a_job_of_the_release_before_reads_format_2(server: Server) -> None:
    server.client.hset(Job.key_for(keys.job_id(RUN_ID, 0)), mapping=cast("dict[Any, Any]", JOB))
    job = read_job(RunStore(server.client).queue("q"), keys.job_id(RUN_ID, 0).encode())
    assert job is not None
    assert read_format(job) == 2


@pytest.mark.parametrize(("field", "value"), [("weight", 0.0), ("weight", -1.0), ("inputs", "images")])
def test_a_run_with_a_wrong_value_is_refused(field: str, value: object) -> None:
    with pytest.raises(WireError, match=field):
        read_run(RUN_ID, {**RUN, b"format": b"5", field.encode(): str(value).encode()})


def test_submitted_files_have_the_same_fields() -> None:
    run = FileRun.read_json(FILE_RUN, "a run")
    assert (run.order.request.inputs, run.order.spec.model) == (("/a.parquet",), "demo")
    written, theirs = json.loads(run.written()), json.loads(FILE_RUN)
    added = {
        "priority",
        "instruction",
        "prompt_template",
        "label",
        "long_stride",
        "long",
    }  # the spec's own rule
    assert (
        theirs["order"]["spec"].keys() - added
        <= written["order"]["spec"].keys()
        <= theirs["order"]["spec"].keys()
    )
    del written["order"]["spec"], theirs["order"]["spec"]
    assert written == theirs
    (argument,) = run.order.arguments()
    assert argument["request"].keys() <= theirs["order"]["request"].keys()  # type: ignore[attr-defined]


def test_what_needs_a_new_runner_is_left_by_others() -> None:
    order = FileRun.read_json(FILE_RUN, "a run").order
    several = order.model_copy(update={"request": order.request.model_copy(update={"models": ("a", "b")})})
    assert several.arguments()[0]["format"] == 4
    assert FileOrder.model_validate(several.model_dump()).request.models == ("a", "b")
