"""Sends webhooks at the end of submitted runs, in the format of https://www.standardwebhooks.com."""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import json
import logging
import threading
import urllib.error
import urllib.request
from contextlib import suppress
from datetime import UTC, datetime
from email.message import Message
from typing import IO, Any
from urllib.parse import urlsplit

import redis

from rankmill.extensions.runners.record import FileRun, Notice
from rankmill.extensions.runners.settings import RunnerSettings, secret_key
from rankmill.extensions.runners.store import FileRunStore
from rankmill.jobs.contract.errors import ConnectionFailed, RedisUnavailable
from rankmill.jobs.runtime.logs import about
from rankmill.jobs.runtime.passwords import mask_passwords
from rankmill.jobs.system import Backoff, Periodic, system

_TIMEOUT = 10
"""Sending a webhook fails after this number of seconds without a byte from the receiver."""

_LONGEST = 60
"""Sending a webhook fails after this number of seconds, even if the receiver still sends bytes."""

_BACKOFF = Backoff(first=2.0, longest=3600.0)

_LOOK_SECONDS = 1.0

_QUICK_SECONDS = 1.0
"""Webhooks to other hosts wait at most this number of seconds for the receiver of one webhook."""

logger = logging.getLogger(__name__)


class WebhookSender:
    """Sends the webhooks of a queue's ended runs, from threads, because receivers may be slow. The sender
    gives each host one webhook at a time. After `_QUICK_SECONDS` it goes on with other hosts.

    A webhook may arrive more than once, always with the same ``webhook-id``.

    Parameters
    ----------
    store
        The queue of submitted runs.
    settings
        The settings, with the secret, the allowed hosts, and the time for which to try. Without a secret or
        hosts, nothing is sent.
    """

    def __init__(self, store: FileRunStore, settings: RunnerSettings) -> None:
        self._store = store
        self._secret = settings.webhook_secret
        self._hosts = settings.webhook_hosts
        self._seconds = settings.webhook_seconds
        self._stopped = False
        self._attempts: dict[str | None, threading.Thread] = {}
        """For each receiver's host, the thread of the latest attempt to send it a webhook."""
        self._periodic = Periodic("webhooks", self._send_due, _LOOK_SECONDS)

    def start(self) -> None:
        if self._secret and self._hosts:
            self._periodic.start()

    def stop(self) -> None:
        """Stop the thread that sends webhooks; another runner sends the remaining ones."""
        self._stopped = True
        self._periodic.stop(seconds=0)

    def wake(self) -> None:
        self._periodic.wake()

    def _send_due(self) -> None:
        self._attempts = {host: last for host, last in self._attempts.items() if last.is_alive()}
        while not self._stopped and (run := self._store.take_webhook()):
            host = urlsplit(run.order.webhook or "").hostname
            if (last := self._attempts.get(host)) and last.is_alive():
                self._store.put_off_webhook(run)
                continue
            attempt = system.Thread(target=self._deliver, args=(run,), name="webhook", daemon=True)
            self._attempts[host] = attempt
            attempt.start()
            attempt.join(_QUICK_SECONDS)

    def _deliver(self, run: FileRun) -> None:
        # After an error here, the webhook is sent again after `WEBHOOK_SECONDS`.
        with about(submitted=run.id), suppress(RedisUnavailable, ConnectionFailed):
            try:
                self._send(run)
            except redis.RedisError:
                logger.exception("webhook failed, trying again")

    def _send(self, run: FileRun) -> None:
        problems: list[str | None] = []
        # Use a thread, because urllib cannot limit the time of the whole answer. A late answer is ignored.
        asking = system.Thread(target=lambda: problems.append(self._problem(run)), daemon=True)
        asking.start()
        asking.join(_LONGEST)
        problem = problems[0] if problems else f"it has not answered within {_LONGEST} s"
        attempts = (run.notice.attempts if run.notice else 0) + 1
        waited = system.now() - (run.ended or 0)
        pause = min(_BACKOFF.pause(attempts), self._store.ttl / 2)  # else the run's record expires
        if problem is None:
            logger.info("webhook delivered")
            notice, after = Notice(state="delivered", attempts=attempts), None
        elif waited + pause > self._seconds:
            logger.warning("webhook given up after %d attempts: %s", attempts, problem)
            notice, after = Notice(state="given up", attempts=attempts, reason=problem), None
        else:
            logger.info("webhook not delivered, next attempt in %.0f s: %s", pause, problem)
            notice, after = Notice(state="due", attempts=attempts, reason=problem), pause
        self._store.note_webhook(run.changed(notice=notice), after)

    def _problem(self, run: FileRun) -> str | None:
        """Send a run's webhook; returns why it was not delivered, or ``None`` if it was."""
        url = run.order.webhook or ""
        if urlsplit(url).hostname not in self._hosts:
            return f"webhook_hosts does not list {urlsplit(url).hostname}"
        body = json.dumps(content(run), separators=(",", ":")).encode()
        headers = {
            "content-type": "application/json",
            "user-agent": "rankmill",
            **signature(self._secret or "", run.id, int(system.now()), body),
        }
        request = urllib.request.Request(url, body, headers, method="POST")  # noqa: S310 -- http(s) only
        try:
            with _OPENER.open(request, timeout=_TIMEOUT) as answer:
                return None if 200 <= answer.status < 300 else f"it answered {answer.status}"
        except urllib.error.HTTPError as error:
            return f"it answered {error.code}"
        except (OSError, http.client.HTTPException, ValueError) as error:
            return mask_passwords(" ".join(str(error).split()))[:200]


def content(run: FileRun) -> dict[str, Any]:
    """The body of a run's webhook."""
    ended = datetime.fromtimestamp(run.ended or 0, UTC)
    return {
        "type": f"run.{run.state}",
        "timestamp": ended.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "data": {
            "id": run.id,
            "state": run.state,
            "reason": run.reason,
            "output": run.order.request.output,
            "outcome": run.outcome.model_dump(mode="json") if run.outcome and run.state == "done" else None,
        },
    }


def signature(secret: str, message_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """The three headers that sign a webhook, with a `secret` that begins with ``whsec_``.

    The package standardwebhooks computes and verifies the same headers, but the code is too short to be worth
    a dependency.
    """
    signed = f"{message_id}.{timestamp}.".encode() + body
    digest = hmac.new(secret_key(secret), signed, hashlib.sha256).digest()
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
    }


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, which could lead to a host that is not allowed."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)
