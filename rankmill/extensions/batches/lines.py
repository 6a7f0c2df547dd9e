"""Reads the requests in a batch's input file, one on each line, and writes the lines with their answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import from_json

from rankmill.extensions.gateway.dialects.base import Body, ScorePath, read_as
from rankmill.extensions.gateway.dialects.routes import dialects, score_paths
from rankmill.extensions.gateway.refusals import Refusal, WrongFile
from rankmill.extensions.gateway.score_request import RequestScores, ScoreRequest
from rankmill.producer.files.stores.paths import AnyPath
from rankmill.producer.files.stores.reading import open_bytes

MAX_LINE_BYTES = 32 << 20

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@cache
def endpoints() -> Mapping[str, ScorePath]:
    """Return the URL paths that a batch's requests may go to, each with its `ScorePath`."""
    return {path.path: path for path in score_paths() if all(body.batched for body in path.bodies)}


class RequestLine(BaseModel):
    """A line of a batch's input file; unknown fields are ignored."""

    model_config = ConfigDict(frozen=True)

    custom_id: str = Field(min_length=1, max_length=512)
    method: str = "POST"
    url: str
    body: dict[str, Any]


_FIELDS = RequestLine.model_fields.keys()


@dataclass(frozen=True)
class BatchRequest:
    """A request in a batch's input file.

    Attributes
    ----------
    number
        Number of the line, from 1.
    asked
        The request for scores in the line's body; ``None`` if the body is wrong.
    refusal
        Why the request gets no scores; ``None`` if it gets scores.
    """

    number: int
    line: RequestLine
    form: type[Body]
    body: Body | None
    asked: ScoreRequest | None
    refusal: Refusal | None = None

    @property
    def rows(self) -> list[tuple[str, ...]]:
        return self.asked.rows() if self.asked else []


def read_requests(path: AnyPath, endpoint: str) -> Iterator[BatchRequest]:
    """Yield the requests of a batch's input file, line by line. A request whose body is wrong has a refusal.

    Raises
    ------
    WrongFile
        A line is not a request for `endpoint`, or repeats a ``custom_id``; the message names the line.
    """
    seen: dict[str, int] = {}
    prefix, _, rest = endpoint.removeprefix("/").partition("/")
    named = {endpoint, f"/{rest}"} if prefix in dialects() else {endpoint}
    for number, raw in _lines(path):
        line = _line(number, raw)
        if line.method.upper() != "POST" or line.url not in named:
            asked = f"{line.method:.20} {line.url:.200}"
            raise WrongFile(f"line {number}: the batch is for POST {endpoint}, and the line for {asked}")
        if before := seen.get(line.custom_id):
            raise WrongFile(f"line {number}: its custom_id is that of line {before}: {line.custom_id:.80}")
        seen[line.custom_id] = number
        yield _request(number, line, endpoints()[endpoint])


def first_request(path: AnyPath, endpoint: str) -> BatchRequest:
    """Return the first request with a valid body in a batch's input file. If no request has a valid body,
    returns the file's first request.

    Raises
    ------
    WrongFile
        A line up to the returned request is not a request for `endpoint`, or repeats a ``custom_id``.
    """
    first = None
    for request in read_requests(path, endpoint):
        first = first or request
        if request.asked:
            return request
    assert first  # `holds_requests` refuses an empty file
    return first


def holds_requests(path: AnyPath) -> bool:
    """Return whether a batch's JSON Lines file has requests, not rows to score. Reads only the first line
    that is not blank.

    Raises
    ------
    WrongFile
        The first line with text is too long or is not a JSON object, or all lines are blank.
    """
    for number, raw in _lines(path):
        value = _object(number, raw)
        fields = _FIELDS & value.keys()
        return isinstance(value.get("body"), dict) or ("custom_id" in fields and len(fields) > 1)
    raise WrongFile("the file is empty: send one with a line for each request")


def answer(
    request: BatchRequest,
    batch: str,
    model: str,
    scores: list[Any],
    created: float,
    labels: tuple[str, ...],
    tokens: int,
) -> str:
    """Make the line with the answer to a request, for a batch's output file. If there are `labels`, each
    score is a list with a number for each label.
    """
    scored = RequestScores(scores, model, tokens, id=_id(batch, request), created=int(created), labels=labels)
    assert request.body
    return _answered(request, batch, 200, request.body.answer(scored))


def failure(request: BatchRequest, batch: str) -> str:
    """Make the line for a refused request, for a batch's error file."""
    assert request.refusal
    dialect = request.form.dialect
    status = dialect.status(request.refusal)
    return _answered(request, batch, status, dialect.error(request.refusal, status))


def _answered(request: BatchRequest, batch: str, status: int, body: object) -> str:
    request_id = _id(batch, request)
    response = {"status_code": status, "request_id": request_id, "body": body}
    line = {"id": request_id, "custom_id": request.line.custom_id, "response": response, "error": None}
    return json.dumps(line, ensure_ascii=False) + "\n"


def _id(batch: str, request: BatchRequest) -> str:
    return f"{batch.replace('batch_', 'batch_req_')}_{request.number}"


def _lines(path: AnyPath) -> Iterator[tuple[int, bytes]]:
    with open_bytes(path) as file:
        number = 0
        while raw := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if number == 1:
                raw = raw.removeprefix(_BYTE_ORDER_MARK)
            if len(raw) > MAX_LINE_BYTES:
                raise WrongFile(f"line {number}: longer than {MAX_LINE_BYTES >> 20} MiB")
            if raw.strip():
                yield number, raw


def _object(number: int, raw: bytes) -> dict[str, Any]:
    try:
        value = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        why = str(error).replace("at line 1 column", "at column")
        raise WrongFile(f"line {number}: not JSON that can be read: {why:.200}") from None
    if not isinstance(value, dict):
        raise WrongFile(f"line {number}: neither a request nor a pair, which are JSON objects")
    return value


def _line(number: int, raw: bytes) -> RequestLine:
    value = _object(number, raw)
    try:
        return read_as(RequestLine, value)
    except Refusal as refusal:
        raise WrongFile(
            f"line {number}: {refusal.message}; a line has custom_id, method, url and body"
        ) from None


def _request(number: int, line: RequestLine, path: ScorePath) -> BatchRequest:
    form = path.bodies[0]
    try:
        form = path.body(line.body)
        body = read_as(form, line.body)
        wanted = path.score_request(body, line.body)
        if not wanted.passages:
            raise Refusal("empty", "there is nothing to score: the list of texts is empty")
    except Refusal as refusal:
        return BatchRequest(number, line, form, None, None, refusal)
    return BatchRequest(number, line, form, body, wanted)
