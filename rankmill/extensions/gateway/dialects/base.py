"""The parts of a dialect: bodies of requests, bodies of answers, and the form of its errors."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rankmill.extensions.gateway.refusals import KINDS, Kind, Refusal, wrong
from rankmill.extensions.gateway.score_request import RequestScores, ScoreRequest, SpecFields
from rankmill.jobs.contract.spec import Long

MAX_TEXT_CHARS = 1 << 20
"""Most characters of one text."""

Text = Annotated[str, Field(max_length=MAX_TEXT_CHARS)]

Top = Annotated[int, Field(ge=1)] | None
"""How many of the best are wanted; ``None``: all."""

JsonObject = dict[str, Any]

T = TypeVar("T", bound=BaseModel)

_KIND = re.compile(r"constrained-str|TextDocument|str|int|float|bool|(list|dict)\[.*")
"""What pydantic adds to a place where values of several kinds may be."""


class TextDocument(BaseModel):
    """A document as an object; fields other than its text are ignored."""

    text: Text


Document = Text | TextDocument


def texts_of(documents: Sequence[str | TextDocument]) -> list[str]:
    """The texts of documents."""
    return [each if isinstance(each, str) else each.text for each in documents]


Scale = Literal["sigmoid", "identity"] | None
"""What scores are: probabilities, the model's output, or (``None``) what the model's own activation makes."""


@dataclass(frozen=True)
class Dialect:
    """How a service words its errors, and what its scores are.

    Attributes
    ----------
    name
        As metrics and prefixes of paths have it.
    error
        The body for a refusal with a status.
    statuses
        Statuses that differ from those in `KINDS`.
    scale
        Of its scores, where a body does not ask for another.
    long
        What becomes of pairs that are too long, where a body does not say it; ``None``: what the gateway's
        setting says.
    """

    name: str
    error: Callable[[Refusal, int], JsonObject]
    statuses: Mapping[Kind, int] = field(default_factory=dict)
    scale: Scale = "sigmoid"
    long: Long | None = None

    def status(self, refusal: Refusal) -> int:
        """The HTTP status for a refusal."""
        return self.statuses.get(refusal.kind, KINDS[refusal.kind].http)


class Fields(BaseModel):
    """Fields of a request's body. Those that a dialect does not know are ignored, as its own server does."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, found: Any) -> Any:
        """Clients send null for what they do not set."""
        if not isinstance(found, dict):
            return found
        return {name: value for name, value in found.items() if value is not None}


class Options(Fields):
    """Fields of a dialect that change scores."""

    @abstractmethod
    def spec(self, owner: Dialect) -> SpecFields:
        """What they mean at a path of `owner`, as fields of a spec; raises `Refusal`."""


class Body(Fields):
    """The body of a request.

    Attributes
    ----------
    dialect
        The service whose clients send it.
    paths
        Where its own server takes it. The gateway also takes it below ``/NAME`` of the dialect.
    summary
        A line for the documentation.
    batched
        Whether batches may have it.
    """

    dialect: ClassVar[Dialect]
    paths: ClassVar[tuple[str, ...]]
    summary: ClassVar[str]
    batched: ClassVar[bool] = True

    stream: bool = Field(False, description="Answer with events: scores as they are there, then the result.")

    @abstractmethod
    def score_request(self, owner: Dialect) -> ScoreRequest:
        """What the request asks for, at a path of `owner`; raises `Refusal` where it cannot be done."""

    @abstractmethod
    def answer(self, scores: RequestScores) -> object:
        """The body of the answer, for JSON."""


class RerankBody(Body):
    """What most services have: texts that are ordered by the probability that they answer a query."""

    model: str | None = None
    query: Text
    documents: list[Document]

    @property
    def texts(self) -> list[str]:
        """The text to score of each document."""
        return texts_of(self.documents)


@dataclass(frozen=True)
class ScorePath:
    """A path to which texts to score, or to tokenize, are sent.

    Attributes
    ----------
    path, summary
        The path, and a line for the documentation.
    bodies
        The bodies that it takes.
    dialect
        Whose path it is: its scale is that of all scores here, in whatever form they are asked for, and pairs
        that are too long fare as with it. Errors are in its form where the body has not been read yet.
    choose
        Which body a JSON object is, where there are several.
    options
        Fields that mean here, in every body, what they mean in the body that has them.
    """

    path: str
    summary: str
    bodies: tuple[type[Body], ...]
    dialect: Dialect
    choose: Callable[[JsonObject], type[Body]] | None = None
    options: tuple[type[Options], ...] = ()

    def body(self, found: JsonObject) -> type[Body]:
        """The kind of body that an object is."""
        return self.choose(found) if self.choose else self.bodies[0]

    def score_request(self, body: Body, found: JsonObject) -> ScoreRequest:
        """What a body that was read from an object asks for here; raises `Refusal`."""
        wanted, usual = body.score_request(self.dialect), spec_for(self.dialect)
        more: SpecFields = {}
        for kind in self.options:
            given = (found.keys() & kind.model_fields) - type(body).model_fields.keys()
            said = read_as(kind, {name: found[name] for name in given}).spec(self.dialect) if given else {}
            more |= {name: value for name, value in said.items() if usual.get(name) != value}
        return replace(wanted, spec={**wanted.spec, **more})


def spec_for(
    owner: Dialect, *, raw: bool = False, truncate: bool | None = None, **others: str | int | None
) -> SpecFields:
    """The fields of a spec for a body at a path of `owner`.

    Parameters
    ----------
    owner
        Whose path it is.
    raw
        Whether it asks for the model's output as it is.
    truncate
        Whether pairs that are too long are to be cut; ``None``: it does not say.
    others
        More fields; those that are ``None`` are left out.
    """
    long = owner.long if truncate is None else "truncate" if truncate else "refuse"
    found = {"activation": "identity" if raw else owner.scale, "long": long, **others}
    return {name: value for name, value in found.items() if value is not None}


def of_labels(spec: SpecFields) -> SpecFields:
    """A spec where all labels of a model are wanted, whatever the gateway's setting ``label`` says."""
    probability = {"activation": "probability"} if spec.get("activation") == "sigmoid" else {}
    return {**spec, **probability, "all_labels": True, "label": None}


def read_as(kind: type[T], found: JsonObject) -> T:
    """Read an object as a body of this kind.

    Raises
    ------
    Refusal
        A field is missing or wrong; the message names it.
    """
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        raise wrong_field(
            error.errors(include_url=False, include_context=False, include_input=False)
        ) from None


def wrong_field(errors: Sequence[Mapping[str, Any]]) -> Refusal:
    """The refusal for what pydantic has found."""
    first = max(errors, key=lambda each: len(each["loc"]))  # the most exact
    parts = [str(part) for part in first["loc"]]
    place = ".".join(part for part in parts if not _KIND.fullmatch(part))[:200] or "the body"
    return wrong(place, first["msg"])


def ranking(
    scores: RequestScores, top: int | None = None, documents: Sequence[object] | None = None
) -> list[JsonObject]:
    """The `top` results, best first, each with its document where these are given."""
    return [
        {"index": place, "relevance_score": score} | ({"document": documents[place]} if documents else {})
        for place, score in scores.ranked(top)
    ]


def usage(scores: RequestScores) -> JsonObject:
    """The tokens of a request, as OpenAI's API counts them."""
    return {"prompt_tokens": scores.tokens, "total_tokens": scores.tokens}


def detail_error(refusal: Refusal, status: int) -> JsonObject:
    """An error as FastAPI words it."""
    return {"detail": refusal.message}
