"""The services of ``tei.v1``, TEI's gRPC interface."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias, TypeVar

from google.protobuf.message import Message

from rankmill.extensions.gateway.dialects.base import of_labels, spec_for
from rankmill.extensions.gateway.dialects.tei import TEI, known_info, no_prompt, simple_tokens
from rankmill.extensions.gateway.gateway import Gateway
from rankmill.extensions.gateway.keys.api_keys import ApiKey
from rankmill.extensions.gateway.observation import Observation
from rankmill.extensions.gateway.refusals import Refusal
from rankmill.extensions.gateway.score_request import (
    MOST_ENCODED,
    RequestScores,
    ScoreRequest,
    SpecFields,
    alone,
    best_first,
    encoding,
)
from rankmill.extensions.grpc import tei_pb2 as tei
from rankmill.jobs.contract.encodings import MAX_TOKEN_ID, TokensAsked, TokensFound

_ROWS = 256
"""Number of a stream's messages that are scored together, unless the gateway's or a key's limit is lower."""

_WAIT_SECONDS = 0.002

_Row: TypeAlias = tuple[str, ...]
"""A pair of texts, or a single text."""

_Predict: TypeAlias = tei.PredictRequest | tei.PredictPairRequest

M = TypeVar("M", bound=Message)
R = TypeVar("R")
_Answer: TypeAlias = "Callable[[TeiServices, Sequence[M], Call], Awaitable[list[R]]]"


@dataclass(frozen=True)
class Call:
    """The facts about a gRPC call for logs and metrics, and the call's API key."""

    note: Observation
    key: ApiKey | None


def _alone(answer: _Answer[M, R]) -> Callable[[TeiServices, M, Call], Awaitable[R]]:
    """Turn `answer`, which answers a list of messages, into a gRPC method that takes one message."""

    async def method(self: TeiServices, request: M, call: Call) -> R:
        (reply,) = await answer(self, [request], call)
        return reply

    return method


def _in_turn(answer: _Answer[M, R]) -> Callable[[TeiServices, AsyncIterator[M], Call], AsyncIterator[R]]:
    """Turn `answer`, which answers a list of messages, into a gRPC method that takes a stream of messages."""

    async def method(self: TeiServices, requests: AsyncIterator[M], call: Call) -> AsyncIterator[R]:
        of_key = call.key.pairs_per_minute if call.key else None
        most_rows = min(_ROWS, self._gateway.own.gateway_pairs, of_key or _ROWS)
        async for batch in _batches(requests, most_rows, self.most_bytes):
            for reply in await answer(self, batch, call):
                yield reply

    return method


class TeiServices:
    """The methods of TEI's services. The gateway's workers score, with the gateway's model.

    Parameters
    ----------
    gateway
        The parts that HTTP and gRPC share.

    Attributes
    ----------
    most_bytes
        A stream for ``RerankStream`` may have at most this many bytes. Other streams are answered batch by
        batch; a batch of messages ends as soon as it has this many bytes.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.most_bytes = gateway.own.gateway_body_mib << 20

    async def info(self, request: tei.InfoRequest, call: Call) -> tei.InfoResponse:
        gateway = self._gateway
        facts = await gateway.scoring.about_model()
        scored = gateway.scoring.contracts[gateway.served.default.model]
        model_info = known_info(
            gateway.settings, gateway.served.default.name, facts, scored, gateway.load.workers
        )
        del model_info["served_model_name"]  # gRPC's message does not have the field
        return tei.InfoResponse(**model_info, model_type=tei.MODEL_TYPE_RERANKER)

    async def rerank(self, request: tei.RerankRequest, call: Call) -> tei.RerankResponse:
        pairs = [(request.query, text) for text in request.texts]
        scored = await self._score(pairs, _spec(request), [request], call)
        return _ranking(scored, pairs, with_text=request.return_text)

    async def rerank_stream(
        self, requests: AsyncIterator[tei.RerankStreamRequest], call: Call
    ) -> tei.RerankResponse:
        """Rank the texts of all messages of a stream. Each message has a text and its query."""
        rows = await _gather(requests, self._gateway.own.gateway_pairs, self.most_bytes)
        if len({(row.truncate, row.truncation_direction) for row in rows}) > 1:
            raise Refusal("invalid", "truncate, truncation_direction: must be the same in all messages")
        pairs = [(row.query, row.text) for row in rows]
        scored = await self._score(pairs, _spec(rows[0] if rows else tei.RerankStreamRequest()), rows, call)
        return _ranking(scored, pairs, with_text=rows[0].return_text)

    async def _tokenize(self, requests: Sequence[tei.EncodeRequest], call: Call) -> list[tei.EncodeResponse]:
        for request in requests:
            if request.HasField("prompt_name"):
                raise no_prompt(request.prompt_name)
        texts = [TokensAsked(text=request.inputs, special=request.add_special_tokens) for request in requests]
        return [
            tei.EncodeResponse(
                tokens=[tei.SimpleToken(**token) for token in simple_tokens(request.inputs, tokens)]
            )
            for request, tokens in zip(requests, await self._encode(texts, call), strict=True)
        ]

    async def _decode(self, requests: Sequence[tei.DecodeRequest], call: Call) -> list[tei.DecodeResponse]:
        if any(number > MAX_TOKEN_ID for request in requests for number in request.ids):
            raise Refusal("invalid", f"ids: a token's id is at most {MAX_TOKEN_ID:,}")
        texts = [
            TokensAsked(ids=tuple(request.ids), special=not request.skip_special_tokens)
            for request in requests
        ]
        return [tei.DecodeResponse(text=tokens.text) for tokens in await self._encode(texts, call)]

    async def _encode(self, texts: Sequence[TokensAsked], call: Call) -> list[TokensFound]:
        tokens: list[TokensFound] = []
        for piece in _pieces(texts):
            wanted = encoding(piece)
            tokens += (await self._submit(wanted, sum(map(len, wanted.passages)), call)).found
        return tokens

    async def _predict(self, requests: Sequence[_Predict], call: Call) -> list[tei.PredictResponse]:
        """Score single texts or pairs. Consecutive requests with the same options are scored in one run."""
        replies = []
        for _, same in groupby(
            requests, lambda request: (request.raw_scores, request.truncate, request.truncation_direction)
        ):
            alike = list(same)
            rows = [_row(request) for request in alike]
            scored = await self._score(rows, of_labels(_spec(alike[0])), alike, call)
            replies += [
                tei.PredictResponse(
                    predictions=[
                        tei.Prediction(score=score, label=label) for label, score in best_first(labels)
                    ],
                    metadata=_metadata(scored, row),
                )
                for labels, row in zip(scored.predictions(), rows, strict=True)
            ]
        return replies

    async def _score(
        self, rows: Sequence[_Row], spec: SpecFields, messages: Sequence[Message], call: Call
    ) -> RequestScores:
        """Score `rows`, the rows of `messages`."""
        if rows and len(rows[0]) == 1:
            wanted = alone([row[0] for row in rows], None, spec)
        else:
            wanted = ScoreRequest([row[0] for row in rows], [row[1] for row in rows], spec=spec)
        return await self._submit(wanted, sum(message.ByteSize() for message in messages), call)

    async def _submit(self, wanted: ScoreRequest, size: int, call: Call) -> RequestScores:
        """Score a request whose messages have `size` bytes."""
        with self._gateway.bodies.body() as body:
            body.count(size)
            scored = await self._gateway.scoring.score(wanted, call.key)
        self._gateway.count(call.note, scored)
        return scored

    predict = predict_pair = _alone(_predict)
    predict_stream = predict_pair_stream = _in_turn(_predict)
    tokenize, tokenize_stream = _alone(_tokenize), _in_turn(_tokenize)
    decode, decode_stream = _alone(_decode), _in_turn(_decode)


def _pieces(texts: Sequence[TokensAsked]) -> Iterator[list[TokensAsked]]:
    """Divide `texts`, in order, into lists. All texts of a list together have at most `MOST_ENCODED`
    characters or token ids. A longer text gets a list of its own.
    """
    piece: list[TokensAsked] = []
    for text in texts:
        if piece and sum(taken.size for taken in piece) + text.size > MOST_ENCODED:
            yield piece
            piece = []
        piece.append(text)
    yield piece


def _spec(options: tei.RerankRequest | tei.RerankStreamRequest | _Predict) -> SpecFields:
    cut_left = options.truncation_direction == tei.TRUNCATION_DIRECTION_LEFT
    return spec_for(
        TEI, raw=options.raw_scores, truncate=options.truncate, truncation_side="left" if cut_left else None
    )


def _row(request: _Predict) -> _Row:
    if isinstance(request, tei.PredictRequest):
        return (request.inputs,)
    if len(request.inputs) != 2:
        raise Refusal("invalid", f"inputs: a pair has two texts, and this one {len(request.inputs):,}")
    return request.inputs[0], request.inputs[1]


def _ranking(scored: RequestScores, pairs: Sequence[_Row], *, with_text: bool) -> tei.RerankResponse:
    ranks = [
        tei.Rank(index=place, score=score, text=pairs[place][1] if with_text else None)
        for place, score in scored.ranked()
    ]
    return tei.RerankResponse(ranks=ranks, metadata=_metadata(scored, *pairs))


def _metadata(scored: RequestScores, *rows: _Row) -> tei.Metadata:
    took = scored.stages()
    return tei.Metadata(
        compute_chars=sum(len(text) for row in rows for text in row),
        # 0 means unknown: the run's tokens may include those of other messages
        compute_tokens=scored.tokens if len(rows) == len(scored.scores) else 0,
        total_time_ns=round(scored.seconds * 1e9),
        tokenization_time_ns=round(took["tokenize"] * 1e9),
        queue_time_ns=round(took["queue"] * 1e9),
        inference_time_ns=round(took["forward"] * 1e9),
    )


async def _batches(stream: AsyncIterable[M], most: int, most_bytes: int) -> AsyncIterator[list[M]]:
    """Yield the messages of a stream in order, in batches.

    A batch ends in three cases: it has `most` messages; it has `most_bytes` or more; or the next message does
    not arrive within 2 ms.
    """
    messages = aiter(stream)
    coming = asyncio.ensure_future(anext(messages, None))
    try:
        while (first := await coming) is not None:
            batch, size = [first], first.ByteSize()
            coming = asyncio.ensure_future(anext(messages, None))
            while len(batch) < most and size < most_bytes:
                await asyncio.wait({coming}, timeout=_WAIT_SECONDS)
                if not coming.done() or (message := coming.result()) is None:
                    break
                batch.append(message)
                size += message.ByteSize()
                coming = asyncio.ensure_future(anext(messages, None))
            yield batch
    finally:
        coming.cancel()


async def _gather(stream: AsyncIterable[M], most: int, most_bytes: int) -> list[M]:
    """Read all messages of a gRPC stream into a list.

    Raises
    ------
    Refusal
        The stream has more than `most` messages, or more than `most_bytes`.
    """
    messages: list[M] = []
    size = 0
    async for message in stream:
        messages.append(message)
        size += message.ByteSize()
        if len(messages) > most:
            raise Refusal("too_large", f"the stream has more than {most:,} texts: send it in parts")
        if size > most_bytes:
            raise Refusal("too_large", f"the stream is larger than {most_bytes >> 20} MiB: send it in parts")
    return messages
