"""Carries out what the live page lets an admin do with jobs, runs and workers.

The admin's key comes in the header Authorization. The page uses no cookie, so a page of another site cannot
act through the browser.
"""

from __future__ import annotations

import hmac
import json
import logging
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Literal
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

import redis
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rankmill.cluster.failed import chosen, clear, failed_jobs, retry
from rankmill.cluster.orders import order_workers, queues_without
from rankmill.cluster.runs import cancel_run
from rankmill.cluster.snapshot import read_cluster
from rankmill.extensions.page.dashboard import respond
from rankmill.jobs.contract.errors import InputError, RankmillError, RedisFailed, RedisUnavailable
from rankmill.jobs.runtime.passwords import mask_passwords
from rankmill.jobs.runtime.patience import redis_errors
from rankmill.jobs.runtime.settings import Settings

_MOST_BYTES = 4096

_STATUSES = {
    RedisUnavailable: HTTPStatus.SERVICE_UNAVAILABLE,
    RedisFailed: HTTPStatus.INTERNAL_SERVER_ERROR,
}
"""HTTP statuses for errors of Redis. Other errors are due to the request, or to its job, run or worker."""

logger = logging.getLogger(__name__)


class Action(BaseModel):
    """An action on a job, a run or a worker. ``id`` is the job's or run's id, or the worker's name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    action: Literal["retry", "clear", "cancel", "drain", "resume"]
    id: str = Field(min_length=1, max_length=1000)


class _Refused(Exception):
    """Raised for a request that is not carried out; the text says why."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


def admin_apps(client: redis.Redis, settings: Settings, key: str) -> dict[str, WSGIApplication]:
    """Return, by path, the WSGI apps for the admin of the live page. One lists the jobs that failed or were
    set aside; the other carries out actions on jobs, runs and workers.

    Parameters
    ----------
    client, settings
        A client of the server, and the settings of the process.
    key
        The text of the setting ``page_admin_key``; both apps refuse requests without it.
    """

    def jobs(environ: WSGIEnvironment) -> object:
        return {"jobs": [job.model_dump() for job in failed_jobs(client)]}

    def act(environ: WSGIEnvironment) -> object:
        action = _read(environ)
        who = environ.get("REMOTE_ADDR", "an unknown address")
        try:
            text = carry_out(client, settings, action)
        except RankmillError as error:
            logger.warning("%s %r for %s: %s", action.action, action.id, who, error)
            raise
        logger.info("%s %r for %s: %s", action.action, action.id, who, text)
        return {"text": text}

    return {"/api/jobs.json": _guarded("GET", jobs, key), "/api/actions": _guarded("POST", act, key)}


def carry_out(client: redis.Redis, settings: Settings, action: Action) -> str:
    """Carry out an action on a job, a run or a worker; returns a sentence that says what was done.

    Raises
    ------
    RankmillError
        The action cannot be carried out.
    """
    match action.action:
        case "cancel":
            return cancel_run(client, settings, action.id)
        case "retry" | "clear":
            (job, *_) = chosen(failed_jobs(client), [action.id])
            done = retry(client, job) if action.action == "retry" else clear(client, job)
            return f"job {job.id} is {done}"
        case order:
            return _order(client, action.id, order)


def _order(client: redis.Redis, name: str, order: Literal["drain", "resume"]) -> str:
    """Tell the worker called `name` to drain or to resume. Do not accept the beginning of a name: several
    workers may share it.
    """
    workers = read_cluster(client, page_size=0).workers
    named = [worker for worker in workers if worker.name == name]
    if not named:
        raise InputError(f"no worker is called {name} any more")
    order_workers(client, named, order, wait_seconds=0)
    waiting = queues_without(workers, [name]) if order == "drain" else []
    waits = "".join(
        f"; no other worker takes the chunks of queue {queue!r}, and they wait" for queue in waiting
    )
    return f"worker {name} is told to {order}{waits}"


def _guarded(method: str, do: Callable[[WSGIEnvironment], object], key: str) -> WSGIApplication:
    """Make a WSGI app that calls `do` for requests with the admin's key, and answers with the result as JSON.
    If a request lacks the key, or `do` raises an expected error, the answer is an error as JSON.
    """

    def app(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        status, answer = HTTPStatus.OK, None
        try:
            if environ["REQUEST_METHOD"] != method:
                raise _Refused(HTTPStatus.METHOD_NOT_ALLOWED, f"this path takes {method}")
            _check_key(environ, key)
            with redis_errors():
                answer = do(environ)
        except _Refused as refused:
            status, text = refused.status, str(refused)
        except RankmillError as error:
            status, text = _STATUSES.get(type(error), HTTPStatus.CONFLICT), str(error)
        except OSError as error:
            status, text = HTTPStatus.SERVICE_UNAVAILABLE, f"Redis is away: {error}"
        if answer is None:
            answer = {"error": mask_passwords(" ".join(text.split()))}
        return respond(start, status, "application/json", json.dumps(answer).encode())

    return app


def _check_key(environ: WSGIEnvironment, key: str) -> None:
    scheme, _, given = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), key.encode()):
        logger.warning("a request of %s has no valid key", environ.get("REMOTE_ADDR", "an unknown address"))
        raise _Refused(HTTPStatus.UNAUTHORIZED, "the key is not that of page_admin_key")


def _read(environ: WSGIEnvironment) -> Action:
    if environ.get("CONTENT_TYPE", "").partition(";")[0].strip().lower() != "application/json":
        raise _Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "send application/json")
    length = environ.get("CONTENT_LENGTH", "")
    if not (length.isascii() and length.isdecimal()):
        raise _Refused(HTTPStatus.LENGTH_REQUIRED, "send Content-Length")
    if len(length) > len(str(_MOST_BYTES)) or int(length) > _MOST_BYTES:
        raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"send at most {_MOST_BYTES} bytes")
    try:
        return Action.model_validate_json(environ["wsgi.input"].read(int(length)))
    except (ValidationError, OSError):
        text = "send {action: retry, clear, cancel, drain or resume; id: of a job, run or worker}"
        raise _Refused(HTTPStatus.BAD_REQUEST, text) from None
