"""Damaged keys: whatever is in Redis, the cluster is shown, the damaged as damaged and the rest as it is."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankmill.cli.main import rankmill
from rankmill.cluster.exporter import exporter_app
from rankmill.cluster.snapshot import read_cluster
from rankmill.jobs.contract import keys
from rankmill.jobs.contract.run import new_run
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.protocol.runs import RunStore
from rankmill.jobs.protocol.worker_report import SCORING_FIELD, WorkerReport
from rankmill.jobs.runtime.connection import impatient
from rankmill.jobs.runtime.http import serve
from rankmill.jobs.runtime.settings import load_settings
from tests.conftest import Server, StartExporter, wait_for
from tests.conftest import serve as serve_valkey

GOOD_WORKER = "good-worker"
REPORT = WorkerReport(device="cpu", started=1.0, beat=2.0, pairs=7)

scalars = st.one_of(
    st.binary(max_size=20),
    st.sampled_from(
        [b"nan", b"inf", b"-1", b"1e400", b"9" * 400, b"\xff\xfe", b"", b"{}", b"[]", b"null", b"NaN", b"2"]
    ),
    st.sampled_from(["NaN", "1e400", "-Infinity", '"x"', "9" * 30, "-5", "{}", '"\\ud800"']).map(
        lambda value: b'{"rows": %s, "since": %s, "at": 1, "device": %s}' % ((value.encode(),) * 3)
    ),
)
ids = st.one_of(st.binary(min_size=1, max_size=12), st.from_regex(r"\A[0-9a-f]{8}\Z").map(str.encode))
RUN_FIELDS = [b"format", b"spec", b"queue", b"ttl", b"max_retries", b"created", b"rows"]
WORKER_FIELDS = [
    b"queues",
    b"state",
    b"birth",
    b"death",
    b"last_heartbeat",
    SCORING_FIELD.encode(),
    b"pid",
    b"hostname",
]


def put(client: redis.Redis, key: bytes, kind: str, value: bytes, fields: dict[bytes, bytes]) -> None:
    """Write a value of any type."""
    untyped: Any = client
    untyped.delete(key)
    if kind == "hash" and fields:
        untyped.hset(key, mapping=fields)
    elif kind == "list":
        untyped.rpush(key, value)
    elif kind == "set":
        untyped.sadd(key, value)
    elif kind == "zset":
        untyped.zadd(key, {value: 4e9})
    else:
        untyped.set(key, value)


kinds = st.sampled_from(["hash", "hash", "string", "string", "list", "set", "zset"])


def keyed(*templates: bytes) -> st.SearchStrategy[bytes]:
    return st.builds(lambda template, name: template % name, st.sampled_from(templates), ids)


damage = st.lists(
    st.tuples(
        ids,
        st.sampled_from([
            b"rankmill:run:%s:meta", b"rankmill:run:%s:progress", b"rankmill:run:%s:errors",
            b"rankmill:worker:%s", b"rq:worker:%s", b"rq:queue:%s", b"rq:wip:%s", b"rq:failed:%s",
            b"rq:job:%s", b"rankmill:queue:%s:waits", b"rankmill:queue:%s:turns:request",
            b"rankmill:queue:%s:turns:bulk",
        ]),
        kinds,
        scalars,
        st.dictionaries(st.sampled_from(RUN_FIELDS + WORKER_FIELDS), scalars, max_size=9),
    ),
    max_size=8,
)  # fmt: skip
whole = st.lists(
    st.sampled_from([b"rankmill:runs", b"rq:workers", b"rq:queues"]).flatmap(
        lambda key: st.tuples(st.just(key), kinds, scalars)
    ),
    max_size=1,
)


@pytest.fixture(scope="module")
def valkey() -> Iterator[Server]:
    yield from serve_valkey()


@pytest.fixture(scope="module")
def page(valkey: Server) -> str:
    host, port = serve(
        exporter_app(impatient(valkey.client), load_settings()),
        "exporter_address",
        "127.0.0.1:0",
        ("scores.example",),
    )
    return f"http://{host}:{port}"


def fill(client: redis.Redis) -> str:
    """A good run, worker and queue; the run's id."""
    untyped: Any = client
    untyped.flushall()
    store = RunStore(client)
    run = new_run(ScoreSpec(model="demo"), queue="good", ttl=600, max_retries=1, rows=10)
    store.restore(run)
    untyped.sadd("rq:workers", f"rq:worker:{GOOD_WORKER}")
    untyped.hset(f"rq:worker:{GOOD_WORKER}", mapping={"queues": "good", "birth": "x", SCORING_FIELD: 1})
    untyped.set(keys.worker(GOOD_WORKER), REPORT.model_dump_json())
    untyped.sadd("rq:queues", "rq:queue:good")
    return run.id


def strict(constant: str) -> None:
    raise AssertionError(f"{constant} in JSON")


Damage = list[tuple[bytes, bytes, str, bytes, dict[bytes, bytes]]]
Replaced = list[tuple[bytes, str, bytes]]


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damaged=damage, replaced=whole)
def test_whatever_is_in_redis_the_rest_is_shown(
    damaged: Damage, replaced: Replaced, valkey: Server, page: str
) -> None:
    check_the_rest(damaged, replaced, valkey, page)


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damaged=damage, replaced=whole)
def test_whatever_else_is_in_redis_the_rest_is_shown(
    damaged: Damage, replaced: Replaced, valkey: Server, page: str
) -> None:
    check_the_rest(damaged, replaced, valkey, page)


def check_the_rest(damaged: Damage, replaced: Replaced, valkey: Server, page: str) -> None:
    client: Any = valkey.client
    run_id = fill(client)
    for name, template, kind, value, fields in damaged:
        put(client, template % name, kind, value, fields)
        client.zadd(keys.runs(), {name: 4e9})
        client.sadd("rq:workers", b"rq:worker:" + name)
        client.sadd("rq:queues", b"rq:queue:" + name)
    for key, kind, value in replaced:
        put(client, key, kind, value, {b"a": value})

    cluster = read_cluster(client)
    gone = {key for key, *_ in replaced}
    if b"rankmill:runs" not in gone:
        assert run_id in [run.id for run in cluster.runs]
    if b"rq:workers" not in gone:
        good = [worker for worker in cluster.workers if worker.name == GOOD_WORKER]
        assert [worker.report for worker in good] == [REPORT]
    if b"rq:queues" not in gone:
        assert "good" in [queue.name for queue in cluster.queues]

    for command in (["status"], ["runs"], ["errors", run_id], ["cancel", "0"], ["status", "--json"]):
        done = CliRunner().invoke(rankmill, [*command, "--redis", valkey.url])
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    json.loads(done.stdout, parse_constant=strict)
    for path in ("/api/cluster.json", "/sd"):
        with urllib.request.urlopen(page + path, timeout=60) as reply:
            json.loads(reply.read(), parse_constant=strict)
    with urllib.request.urlopen(page + "/metrics", timeout=60) as reply:
        assert b"rankmill_redis_up 1.0" in reply.read()


def test_what_is_damaged_is_named(valkey: Server) -> None:
    client: Any = valkey.client
    run_id = fill(client)
    client.zadd(keys.runs(), {b"\xff\xfe": 4e9, "0af": 4e9, "1af": 4e9})
    client.hset(keys.run("0af"), mapping={"format": "odd", "queue": "q"})
    client.set(keys.run("1af"), "no hash")
    client.set(keys.progress(run_id), '{"rows": NaN, "at": 1e400}')
    client.set(keys.worker(GOOD_WORKER), b"\xff")
    reasons = {each.key: each.reason for each in read_cluster(client).damaged}
    assert reasons.keys() == {
        keys.runs(), keys.run("0af"), keys.run("1af"), keys.progress(run_id), keys.worker(GOOD_WORKER)
    }  # fmt: skip
    assert "not UTF-8" in reasons[keys.runs()]
    assert "has format odd, this release reads" in reasons[keys.run("0af")]
    assert "another type" in reasons[keys.run("1af")]
    shown = CliRunner().invoke(rankmill, ["status", "--redis", valkey.url], env={"COLUMNS": "200"})
    assert "These keys in Redis are damaged" in shown.output
    assert run_id[:12] in shown.output
    client.rpush(keys.errors(run_id), b"\xff", '{"row": 3, "error": "it", "attempts": 1, "worker": "w"}')
    listed = CliRunner().invoke(rankmill, ["errors", run_id, "--json", "--redis", valkey.url])
    assert json.loads(listed.stdout)["row"] == 3
    assert "1 entries" in listed.stderr


def test_the_history_goes_on_over_damaged_keys(server: Server, exporters: StartExporter) -> None:
    client: Any = server.client
    fill(client)
    soon = "import rankmill.extensions.page.dashboard as d; d._LOOK_SECONDS = 0.2"
    url = exporters(server.url, before=soon)

    def points() -> list[float | None]:
        with urllib.request.urlopen(url + "/api/cluster.json", timeout=60) as reply:
            series: dict[str, list[float | None]] = json.loads(reply.read())["series"]
            return series["waiting"]

    client.zadd(keys.runs(), {b"\xff": 4e9})
    client.set(keys.worker(GOOD_WORKER), '{"device": "cpu", "started": 1e400, "beat": NaN}')
    client.set("rq:queue:good", "no list")
    wait_for(lambda: len(points()) >= 2)
    before = len(points())
    wait_for(lambda: len(points()) > before)
    assert None not in points()


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST.:80", 200),
        ("127.0.0.1", 200),
        ("10.1.2.3:9807", 200),
        ("[::1]:9807", 200),
        ("scores.example", 200),
        ("Scores.Example:9807", 200),
        ("evil.example", 403),
        ("scores.example.evil.example", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("evil.example:9807", 403),
        ("[nonsense", 403),
        ("", 403),
    ],
)
def test_only_names_of_this_host_are_answered(host: str, status: int, page: str) -> None:
    for path in ("/", "/api/cluster.json", "/metrics", "/sd"):
        request = urllib.request.Request(page + path, headers={"Host": host})
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                found = reply.status
        except urllib.error.HTTPError as error:
            found = error.code
        assert found == status, path


def test_an_app_that_fails_is_logged_and_answered(caplog: pytest.LogCaptureFixture) -> None:
    def fails(environ: Any, start: Any) -> list[bytes]:
        raise ZeroDivisionError(environ["PATH_INFO"])

    host, port = serve(fails, "metrics_address", "127.0.0.1:0")
    with pytest.raises(urllib.error.HTTPError, match="500") as failed:
        urllib.request.urlopen(f"http://{host}:{port}/x", timeout=60)
    assert b"ZeroDivisionError" not in failed.value.read()
    assert "ZeroDivisionError" in caplog.text
