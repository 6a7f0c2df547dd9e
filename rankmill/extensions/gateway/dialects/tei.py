"""The dialect of TEI (text-embeddings-inference)."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from itertools import accumulate
from typing import Annotated, Literal

from pydantic import Field

from rankmill.extensions.gateway.dialects.base import (
    Body,
    Dialect,
    JsonObject,
    Many,
    Options,
    Text,
    of_labels,
    spec_for,
)
from rankmill.extensions.gateway.refusals import Kind, Refusal, wrong
from rankmill.extensions.gateway.score_request import (
    RequestScores,
    ScoreRequest,
    SpecFields,
    alone,
    best_first,
    encoding,
)
from rankmill.extensions.gateway.settings import GatewaySettings
from rankmill.jobs.contract.encodings import TokenId, TokensAsked, TokensFound
from rankmill.jobs.runtime.settings import Settings

ERROR_TYPES: dict[Kind, str] = {
    "empty": "Empty",
    "busy": "Overloaded",
    "overloaded": "Overloaded",
    "backend": "Backend",
    "unavailable": "Unhealthy",
    "timeout": "Backend",
}
"""TEI's names for kinds of refusals; its name for all other kinds is ``Validation``."""


def _error(refusal: Refusal, status: int) -> JsonObject:
    message = refusal.message
    if refusal.tokens:
        given, most = refusal.tokens
        message = f"`inputs` must have less than {most} tokens. Given: {given}; {message}"
    return {"error": message, "error_type": ERROR_TYPES.get(refusal.kind, "Validation")}


TEI = Dialect("tei", _error, {"invalid": 422, "backend": 424, "timeout": 424})

Direction = Literal["Right", "Left", "right", "left"]


_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "auto": "float32"}

_MOST = (1 << 31) - 1
"""The largest number that TEI's gRPC messages and clients can hold."""


def known_info(
    settings: Settings, name: str, facts: TokensFound, scored: Mapping[str, str], workers: int
) -> JsonObject:
    """Return the facts for TEI's "info" that HTTP and gRPC share: the gateway's model and limits.

    Parameters
    ----------
    settings, name
        The gateway's settings, and the name of its model for callers.
    facts
        The model's facts, as a worker has reported them.
    scored
        How the model's latest scores were made, such as their precision; empty if there are none yet.
    workers
        The number of workers, which is also the number of threads that tokenize.
    """
    most = min(facts.most, _MOST)
    precision = scored.get("precision", settings.precision)
    own = settings.of(GatewaySettings)
    return {
        "version": version("rankmill"),
        "model_id": name,
        "served_model_name": name,
        "model_sha": settings.revision,
        "model_dtype": _DTYPES.get(precision, precision),
        "max_concurrent_requests": own.gateway_requests,
        "max_client_batch_size": own.gateway_pairs,
        "max_input_length": most,
        "max_batch_tokens": min(most * own.gateway_pairs, _MOST),  # the most tokens that a request can have
        "tokenization_workers": max(workers, 1),
    }


class TeiOptions(Options):
    """Fields of `TeiRerank` and `TeiPredict` that change scores."""

    truncate: bool | None = Field(
        None,
        description="Whether longer pairs are cut (null means true); otherwise they are an error.",
    )
    truncation_direction: Direction | None = Field(
        None, description="The side at which longer pairs are cut (null: that of the model's tokenizer)."
    )
    raw_scores: bool = False

    def spec(self, owner: Dialect) -> SpecFields:
        side = self.truncation_direction and self.truncation_direction.lower()
        return spec_for(owner, raw=self.raw_scores, truncate=self.truncate, truncation_side=side)


class TeiRerank(TeiOptions, Body):
    """The body of TEI's ``POST /rerank``."""

    dialect = TEI
    paths = ("/rerank",)
    summary = "TEI: order texts by their score with a query"

    query: Text
    texts: Many[Text]
    return_text: bool = False

    def score_request(self, owner: Dialect) -> ScoreRequest:
        return ScoreRequest(self.query, self.texts, spec=self.spec(owner))

    def answer(self, scores: RequestScores) -> object:
        ranks = [{"index": place, "score": score} for place, score in scores.ranked()]
        if self.return_text:
            return [{**rank, "text": self.texts[int(rank["index"])]} for rank in ranks]
        return ranks


class TeiPredict(TeiOptions, Body):
    """The body of TEI's ``POST /predict``, which asks for the scores of all labels for single texts or pairs
    of texts.
    """

    dialect = TEI
    paths = ("/predict",)
    summary = "TEI: score texts, or pairs of texts, by all labels"

    inputs: Annotated[
        Text | Many[Text] | Many[Many[Text]],
        Field(
            description="A text, a pair of texts, or several of either: [[text], ...] or [[text, text], ...]"
        ),
    ]

    def score_request(self, owner: Dialect) -> ScoreRequest:
        rows = self._rows()
        sizes = {len(row) for row in rows}
        if not sizes <= {1, 2}:
            raise wrong("inputs", "each is one text, or a pair of texts")
        if len(sizes) > 1:
            raise wrong("inputs", "single texts and pairs go into two requests")
        spec = of_labels(self.spec(owner))
        if sizes == {1}:
            return alone([text for (text,) in rows], None, spec)
        return ScoreRequest([row[0] for row in rows], [row[1] for row in rows], spec=spec)

    def answer(self, scores: RequestScores) -> object:
        predictions = [
            [{"score": score, "label": label} for label, score in best_first(row)]
            for row in scores.predictions()
        ]
        return predictions if self._is_batch() else predictions[0]

    def _is_batch(self) -> bool:
        return isinstance(self.inputs, list) and not all(isinstance(row, str) for row in self.inputs)

    def _rows(self) -> list[list[str]]:
        if isinstance(self.inputs, str):
            return [[self.inputs]]
        if not self._is_batch():
            return [[str(text) for text in self.inputs]] if self.inputs else []
        return [list(row) for row in self.inputs]


class TeiTokenize(Body):
    """The body of TEI's ``POST /tokenize``, which asks for the tokens of texts without truncation."""

    dialect = TEI
    paths = ("/tokenize",)
    summary = "TEI: the tokens of texts"
    batched = False

    inputs: Text | Many[Text]
    add_special_tokens: bool = True
    prompt_name: Annotated[str | None, Field(description="Must be null: no prompt has a name.")] = None

    def score_request(self, owner: Dialect) -> ScoreRequest:
        if self.prompt_name is not None:
            raise no_prompt(self.prompt_name)
        return encoding([TokensAsked(text=text, special=self.add_special_tokens) for text in self._texts()])

    def answer(self, scores: RequestScores) -> object:
        return [simple_tokens(text, tokens) for text, tokens in zip(self._texts(), scores.found, strict=True)]

    def _texts(self) -> list[str]:
        return [self.inputs] if isinstance(self.inputs, str) else self.inputs


def no_prompt(name: str) -> Refusal:
    """Make the refusal of a request for a named prompt. Only TEI's own server has named prompts."""
    return wrong("prompt_name", f"the model has no prompt {name!r:.80}: leave it out")


def simple_tokens(text: str, tokens: TokensFound) -> list[JsonObject]:
    """Return the tokens of `text` in TEI's JSON form. ``start`` and ``stop`` say where a token begins and
    ends in the text, in bytes of UTF-8. For special tokens, ``start`` and ``stop`` are null.

    Raises
    ------
    Refusal
        The worker's answer has places outside of the text.
    """
    places = list(accumulate(map(_bytes, text), initial=0))
    if any(max(span) > len(text) for span in tokens.spans):
        raise Refusal("backend", "a worker has answered with places outside of the text")
    shown: list[JsonObject] = []
    for number, word, special, (first, end) in zip(
        tokens.ids, tokens.words, tokens.special, tokens.spans, strict=True
    ):
        start, stop = (None, None) if special else (places[first], places[end])
        token = word if special else text[first:end]
        shown.append({"id": number, "text": token, "special": special, "start": start, "stop": stop})
    return shown


def _bytes(character: str) -> int:
    return 1 + sum(ord(character) > last for last in (0x7F, 0x7FF, 0xFFFF))


class TeiDecode(Body):
    """The body of TEI's ``POST /decode``, which asks for the texts of token ids."""

    dialect = TEI
    paths = ("/decode",)
    summary = "TEI: the texts of tokens"
    batched = False

    ids: Many[TokenId] | Many[Many[TokenId]]
    skip_special_tokens: bool = True

    def score_request(self, owner: Dialect) -> ScoreRequest:
        several = [ids for ids in self.ids if isinstance(ids, list)]
        rows = several or [[token_id for token_id in self.ids if isinstance(token_id, int)]]
        return encoding([TokensAsked(ids=tuple(ids), special=not self.skip_special_tokens) for ids in rows])

    def answer(self, scores: RequestScores) -> object:
        return [row.text for row in scores.found]


BODIES = (TeiRerank, TeiPredict, TeiTokenize, TeiDecode)
