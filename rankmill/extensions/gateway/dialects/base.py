"""Base classes for dialects. A dialect is one rerank service's HTTP interface: its requests, answers, errors.

A package adds a dialect by an entry point of the group ``rankmill.dialects``. The entry point has the
dialect's name, and points to a tuple of the dialect's `Body` classes.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rankmill.extensions.gateway.refusals import KINDS, Kind, Refusal, wrong
from rankmill.extensions.gateway.score_request import RequestScores, ScoreRequest, SpecFields
from rankmill.jobs.contract.spec import Long

MAX_TEXT_CHARS = 1 << 20

Text = Annotated[str, Field(max_length=MAX_TEXT_CHARS)]

Item = TypeVar("Item")

Many: TypeAlias = Annotated[list[Item], Field(fail_fast=True)]
"""A list, checked only up to the first wrong item: errors for millions of items would fill the memory."""

Top = Annotated[int, Field(ge=1)] | None
"""Number of best documents to return; ``None`` means all."""

JsonObject = dict[str, Any]

T = TypeVar("T", bound=BaseModel)

_KIND = re.compile(r"constrained-str|TextDocument|str|int|float|bool|(list|dict|function-before)\[.*")
"""Matches the names of types that pydantic puts into a field's path. An error of pydantic names
``documents.0.TextDocument.text``, but the request's field is ``documents.0.text``.
"""


class TextDocument(BaseModel):
    """A document that is a JSON object, such as ``{"text": "..."}``. Its other fields are ignored."""

    text: Text


Document = Text | TextDocument


def texts_of(documents: Sequence[str | TextDocument]) -> list[str]:
    """Return the text of each of the documents, in order."""
    return [document if isinstance(document, str) else document.text for document in documents]


Scale = Literal["sigmoid", "identity"] | None
"""The activation function that makes scores from the model's output. With ``None``, the gateway's setting
``activation`` decides.
"""


@dataclass(frozen=True)
class Dialect:
    """The form of one rerank service's HTTP interface: how its errors look, and which scale its scores have.

    Attributes
    ----------
    name
        The dialect's name in metrics, and in the prefix ``/NAME`` of its paths.
    error
        Makes the body of an answer from a refusal and its HTTP status.
    statuses
        This service's HTTP statuses for kinds of refusals, where they differ from `KINDS`.
    scale
        The activation function that makes the scores, unless a body asks for another. With ``None``, the
        gateway's setting ``activation`` decides.
    long
        What happens to pairs that are too long, if the request's body does not say it. With ``None``, the
        gateway's setting ``long`` decides.
    """

    name: str
    error: Callable[[Refusal, int], JsonObject]
    statuses: Mapping[Kind, int] = field(default_factory=dict)
    scale: Scale = "sigmoid"
    long: Long | None = None

    def status(self, refusal: Refusal) -> int:
        return self.statuses.get(refusal.kind, KINDS[refusal.kind].http)


def _without_nulls(sent: JsonObject) -> JsonObject:
    """Return the fields of a JSON object that are not null. Clients send null for fields that they do not
    set.
    """
    return {name: value for name, value in sent.items() if value is not None}


class Fields(BaseModel):
    """Base class for fields of a request's body. Null counts as absent, and unknown fields are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, sent: Any) -> Any:
        return _without_nulls(sent) if isinstance(sent, dict) else sent


class Options(Fields):
    """Base class for the options in a request's body that change scores."""

    @abstractmethod
    def spec(self, owner: Dialect) -> SpecFields:
        """Return the fields of a `ScoreSpec` that these options set. Raises `Refusal` for wrong options.

        Parameters
        ----------
        owner
            The dialect that the request's path belongs to. Its defaults apply.
        """


class Body(Fields):
    """Base class for the body of a request in one dialect; it also makes the body of the answer.

    Attributes
    ----------
    dialect
        The dialect of the clients that send the body.
    paths
        The body's paths on the dialect's own server, such as ``/rerank``. The gateway also takes the body at
        these paths with the dialect's name as prefix, such as ``/tei/rerank``.
    summary
        A line for the documentation.
    batched
        Whether a batch may have requests with this body.
    """

    dialect: ClassVar[Dialect]
    paths: ClassVar[tuple[str, ...]]
    summary: ClassVar[str]
    batched: ClassVar[bool] = True

    stream: bool = Field(False, description="Answer with events: scores as they come, then the result.")

    @abstractmethod
    def score_request(self, owner: Dialect) -> ScoreRequest:
        """Turn this body into a request for scores. Raises `Refusal` if the body is wrong.

        Parameters
        ----------
        owner
            The dialect that the request's path belongs to. Its defaults apply.
        """

    @abstractmethod
    def answer(self, scores: RequestScores) -> object:
        """Make the body of the answer from this request's scores. It is sent as JSON."""


class RerankBody(Body):
    """A rerank body with a model, a query and documents, as in Cohere v2 and Voyage."""

    model: str | None = None
    query: Text
    documents: Many[Document]

    @property
    def texts(self) -> list[str]:
        return texts_of(self.documents)


@dataclass(frozen=True)
class ScorePath:
    """A path to which clients send texts to score or to tokenize.

    Attributes
    ----------
    path, summary
        The path, and a line for the documentation.
    bodies
        The classes of the bodies that the path takes.
    dialect
        The dialect that the path belongs to. The `scale` and `long` of this dialect apply to all bodies of
        the path, also to bodies of other dialects. An error before the body has been read has this dialect's
        form.
    choose
        Chooses the body's class by the fields of a JSON object. ``None`` if the path takes only one class.
    options
        Further options that a client may add to any body of the path.
    """

    path: str
    summary: str
    bodies: tuple[type[Body], ...]
    dialect: Dialect
    choose: Callable[[JsonObject], type[Body]] | None = None
    options: tuple[type[Options], ...] = ()

    def body(self, sent: JsonObject) -> type[Body]:
        return self.choose(_without_nulls(sent)) if self.choose else self.bodies[0]

    def score_request(self, body: Body, sent: JsonObject) -> ScoreRequest:
        """Turn an HTTP body into a request for scores. Raises `Refusal` if the body is wrong.

        Parameters
        ----------
        body
            The body, read as an object of its class.
        sent
            The same body as a JSON object, which may also have fields of the path's `options`.
        """
        wanted, usual = body.score_request(self.dialect), spec_for(self.dialect)
        more: SpecFields = {}
        for kind in self.options:
            given = (sent.keys() & kind.model_fields) - type(body).model_fields.keys()
            said = read_as(kind, {name: sent[name] for name in given}).spec(self.dialect) if given else {}
            more |= {name: value for name, value in said.items() if usual.get(name) != value}
        return replace(wanted, spec={**wanted.spec, **more})


def spec_for(
    owner: Dialect, *, raw: bool = False, truncate: bool | None = None, **others: str | int | None
) -> SpecFields:
    """Return the fields of a `ScoreSpec` for a request, with the defaults of its path's dialect.

    Parameters
    ----------
    owner
        The dialect that the path belongs to.
    raw
        Whether the body asks for the model's output without an activation.
    truncate
        Whether pairs that are too long are cut; ``None`` if the body does not say this.
    others
        More fields of the `ScoreSpec`; those that are ``None`` are left out.
    """
    long = owner.long if truncate is None else "truncate" if truncate else "refuse"
    options = {"activation": "identity" if raw else owner.scale, "long": long, **others}
    return {name: value for name, value in options.items() if value is not None}


def of_labels(spec: SpecFields) -> SpecFields:
    """Change a spec's fields to ask for the scores of all labels, and return them as a new dictionary.

    The activation ``sigmoid`` becomes ``probability``.
    """
    probability = {"activation": "probability"} if spec.get("activation") == "sigmoid" else {}
    return {**spec, **probability, "all_labels": True, "label": None}


def read_as(kind: type[T], sent: JsonObject) -> T:
    """Read a JSON object as a body of the class `kind`.

    Raises
    ------
    Refusal
        A field is missing or wrong; the message names it.
    """
    try:
        return kind.model_validate(sent)
    except ValidationError as error:
        raise wrong_field(
            error.errors(include_url=False, include_context=False, include_input=False)
        ) from None


def wrong_field(errors: Sequence[Mapping[str, Any]]) -> Refusal:
    """Make the refusal of a request in which pydantic has found errors. The message names only
    one error: that of the most deeply nested field.
    """
    first = max(errors, key=lambda problem: len(problem["loc"]))
    parts = [str(part) for part in first["loc"]]
    place = ".".join(part for part in parts if not _KIND.fullmatch(part))[:200] or "the body"
    return wrong(place, first["msg"].removeprefix("Value error, "))


def ranking(
    scores: RequestScores, top: int | None = None, documents: Sequence[object] | None = None
) -> list[JsonObject]:
    """Return the results of a request as JSON objects, best first.

    Parameters
    ----------
    scores
        The scores of the request.
    top
        Number of results to return; ``None`` means all.
    documents
        The request's documents, if each result shall have its document.
    """
    return [
        {"index": place, "relevance_score": score} | ({"document": documents[place]} if documents else {})
        for place, score in scores.ranked(top)
    ]


def usage(scores: RequestScores) -> JsonObject:
    """The field ``usage`` of an answer, in the form of OpenAI's API."""
    return {"prompt_tokens": scores.tokens, "total_tokens": scores.tokens}


def detail_error(refusal: Refusal, status: int) -> JsonObject:
    """Return the body of an answer to a refused request, in the form of FastAPI's own errors."""
    return {"detail": refusal.message}
