"""Webhooks at the end of submitted runs: signed, retried, given up, and in nobody's way."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rankmill import Client
from rankmill.extensions.runners import redis_keys as keys
from rankmill.extensions.runners.record import FileRun, Notice
from rankmill.extensions.runners.settings import RunnerSettings
from rankmill.extensions.runners.show import describe
from rankmill.extensions.runners.store import FileRunStore
from rankmill.extensions.runners.webhooks import WebhookSender, signature
from rankmill.jobs.contract.errors import ConfigError, RunFailed
from rankmill.jobs.contract.file_request import FileOrder, FileRequest
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.protocol.leases import server_time
from rankmill.jobs.runtime.settings import load_settings
from rankmill.producer.client.files import FileHandle
from tests.conftest import Server, StartRunner, wait_for

SECRET = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"


class Receiver:
    """Answers as it is told, and remembers what it got."""

    def __init__(self, answer: Callable[[int], int]) -> None:
        self.got: list[tuple[dict[str, str], bytes]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.got.append(({name.lower(): value for name, value in self.headers.items()}, body))
                status = answer(len(receiver.got))
                self.send_response(status)
                if status == 302:
                    self.send_header("location", f"{receiver.url}elsewhere")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/"


@contextmanager
def receiver(answer: Callable[[int], int]) -> Iterator[Receiver]:
    found = Receiver(answer)
    threading.Thread(target=found.server.serve_forever, daemon=True).start()
    try:
        yield found
    finally:
        found.server.shutdown()
        found.server.server_close()


@pytest.fixture
def client(shared_queue: Server, tiny_model: Path, request: pytest.FixtureRequest) -> Client:
    return Client(shared_queue.url, model=str(tiny_model), file_queue=f"files-{request.node.name}")


@pytest.fixture
def start(
    client: Client, shared_queue: Server, runners: StartRunner, tmp_path: Path
) -> Callable[..., object]:
    (tmp_path / "in.csv").write_text("query,passage\nmoon,a moon\ncat,a cat\n")

    def start(**environ: str) -> object:
        own = {"RANKMILL_WEBHOOK_SECRET": SECRET, "RANKMILL_WEBHOOK_HOSTS": "127.0.0.1", **environ}
        name = client.settings.of(RunnerSettings).file_queue
        return runners(shared_queue, "--file-queue", name, environ=own)

    return start


def notice(run: FileHandle) -> Notice | None:
    """What has become of a run's webhook."""
    found = run.status()
    assert isinstance(found, FileRun)
    return found.notice


def test_the_signature_is_that_of_the_standard() -> None:
    headers = signature(
        "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
        "msg_p5jXN8AQM9LWM0D4loKWxJek",
        1614265330,
        b'{"test": 2432232314}',
    )
    assert headers == {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }


def test_it_is_sent_again_until_it_arrives_and_no_run_waits_for_it(
    client: Client, start: Callable[..., object], tmp_path: Path
) -> None:
    free = threading.Event()

    def answer(number: int) -> int:
        if number == 1:
            free.wait(60)
            return 500
        return 200

    start()
    source = str(tmp_path / "in.csv")
    with receiver(answer) as found:
        first = client.submit_file(source, str(tmp_path / "1.csv"), webhook=found.url)
        wait_for(lambda: found.got)  # and it gets no answer
        assert client.submit_file(source, str(tmp_path / "2.csv")).wait(60).state == "done"
        free.set()
        wait_for(lambda: getattr(notice(first), "state", "") == "delivered")
    assert getattr(notice(first), "attempts", 0) == 2
    (headers, body), (again, same) = found.got
    assert body == same
    assert headers["webhook-id"] == again["webhook-id"] == first.id
    signed = f"{first.id}.{again['webhook-timestamp']}.".encode() + body
    digest = hmac.new(base64.b64decode(SECRET.removeprefix("whsec_")), signed, hashlib.sha256).digest()
    assert again["webhook-signature"] == f"v1,{base64.b64encode(digest).decode()}"
    told = json.loads(body)
    assert (told["type"], told["data"]["id"], told["data"]["state"]) == ("run.done", first.id, "done")
    assert (told["data"]["output"], told["data"]["outcome"]["rows"]) == (str(tmp_path / "1.csv"), 2)
    assert SECRET.removeprefix("whsec_") not in (tmp_path / "runner.log").read_text()


def test_one_that_never_arrives_is_given_up_and_no_redirect_is_followed(
    client: Client, start: Callable[..., object], tmp_path: Path
) -> None:
    start(RANKMILL_WEBHOOK_SECONDS="1")
    with receiver(lambda number: 302) as found:
        run = client.submit_file(str(tmp_path / "gone.csv"), str(tmp_path / "out.csv"), webhook=found.url)
        with pytest.raises(RunFailed):
            run.wait(60)
        wait_for(lambda: getattr(notice(run), "state", "") == "given up")
    assert getattr(notice(run), "reason", "") == "it answered 302"
    assert [json.loads(body)["type"] for _, body in found.got] == ["run.failed"]
    assert not client.store.redis.zcard(keys.webhooks(client.settings.of(RunnerSettings).file_queue))


def test_a_webhook_that_no_runner_may_send_is_told_before_any_work(
    client: Client, start: Callable[..., object], tmp_path: Path
) -> None:
    start()
    run = client.submit_file(str(tmp_path / "in.csv"), str(tmp_path / "out.csv"), webhook="http://10.0.0.1/")
    with pytest.raises(RunFailed, match=r"webhook: webhook_hosts of this runner does not list 10\.0\.0\.1"):
        run.wait(60)
    assert not (tmp_path / "out.csv").exists()
    with pytest.raises(ConfigError, match="webhook: 'file:///etc/passwd' is not an http:// or https:// URL"):
        client.submit_file(str(tmp_path / "in.csv"), str(tmp_path / "out.csv"), webhook="file:///etc/passwd")
    for url in (
        "http://[::1/", "http://127.0.0.1:port/", "http://127.0.0.1:65536/", "http://user:word@127.0.0.1/",
        "http://127.0.0.1/ä", "http:///hook", "http://127.0.0.1/\x7f",
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=r"webhook: .* is not an http:// or https:// URL of ASCII"):
            client.submit_file(str(tmp_path / "in.csv"), str(tmp_path / "out.csv"), webhook=url)
    with pytest.raises(ConfigError, match="webhook_secret: ") as wrong:
        load_settings({"webhook_secret": "whsec_verysecret"}).of(RunnerSettings)
    assert "verysecret" not in str(wrong.value)


def ended_run(store: FileRunStore, webhook: str) -> FileRun:
    """A run that has just ended; no runner has ever held it."""
    request = FileRequest(inputs=("/in.csv",), output="/out.csv")
    store.submit(FileOrder(request=request, spec=ScoreSpec(model="demo"), webhook=webhook))
    claim = store.claim(60)
    assert claim
    done = claim.run.end("done")
    assert store.end(replace(claim, run=done))
    return done


def test_a_slow_receiver_delays_no_other_host(server: Server) -> None:
    store = FileRunStore(server.client, "files", 3600)
    free = threading.Event()

    def answer(number: int) -> int:
        free.wait(60)
        return 200

    settings = load_settings({"webhook_secret": SECRET, "webhook_hosts": "127.0.0.1,localhost"})
    sender = WebhookSender(store, settings.of(RunnerSettings))
    with receiver(answer) as slow, receiver(lambda number: 200) as quick:
        to_slow = [ended_run(store, slow.url.replace("127.0.0.1", "localhost")).id for _ in range(2)]
        to_quick = ended_run(store, quick.url).id
        for run in to_slow:  # else all may be due in the same second, and in any order
            server.client.zincrby(keys.webhooks("files"), -10, run)
        sender.start()
        try:
            wait_for(lambda: quick.got and slow.got)
            (held,) = [headers["webhook-id"] for headers, _ in slow.got]
            (put_off,) = {*to_slow} - {held}
            free.set()
            wait_for(lambda: getattr(store.load(put_off).notice, "state", "") == "delivered")
        finally:
            free.set()
            sender.stop()
    assert getattr(store.load(to_quick).notice, "state", "") == "delivered"
    assert "webhook delivered after 1 attempt\n" in describe(store.load(put_off))  # putting off is no attempt


def test_a_receiver_that_answers_without_end_is_tried_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankmill.extensions.runners.webhooks._LONGEST", 0.5)
    store, over = FileRunStore(server.client, "files", 3600), threading.Event()

    def answer(number: int) -> int:
        return 200

    settings = load_settings({"webhook_secret": SECRET, "webhook_hosts": "127.0.0.1"})
    sender = WebhookSender(store, settings.of(RunnerSettings))
    with receiver(answer) as found:

        def drip(handler: BaseHTTPRequestHandler, *_: object) -> None:
            while not over.wait(0.05):
                handler.wfile.write(b"H")

        monkeypatch.setattr(found.server.RequestHandlerClass, "send_response", drip)
        run = ended_run(store, found.url)
        sender.start()
        try:
            wait_for(lambda: getattr(store.load(run.id).notice, "attempts", 0))
        finally:
            over.set()
            sender.stop()
    assert getattr(store.load(run.id).notice, "reason", "") == "it has not answered within 0.5 s"


def test_the_next_attempt_comes_before_the_record_expires(server: Server) -> None:
    store = FileRunStore(server.client, "files", 600)
    settings = load_settings({"webhook_secret": SECRET, "webhook_hosts": "localhost"})
    run = ended_run(store, "http://127.0.0.1/").changed(notice=Notice(attempts=20))
    WebhookSender(store, settings.of(RunnerSettings))._send(run)
    due = server.client.zscore(keys.webhooks("files"), run.id)
    assert isinstance(due, float)
    assert 0 < due - server_time(server.client) < 600


def test_webhooks_expire_even_if_the_server_has_lost_the_others(server: Server) -> None:
    store = FileRunStore(server.client, "files", 3600)
    run = ended_run(store, "http://127.0.0.1/")
    server.client.delete(keys.webhooks("files"))
    store.note_webhook(run, 60)
    assert 0 < server.client.ttl(keys.webhooks("files")) <= 3600
