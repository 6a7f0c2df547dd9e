"""What a dialect is: bodies of requests, bodies of answers, and the form of its errors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from rankmill.gateway.refusals import STATUS, Kind, Refusal
from rankmill.gateway.scoring import Asked, Scored

MAX_TEXT_CHARS = 1 << 20
"""Most characters of one text."""

Text = Annotated[str, Field(max_length=MAX_TEXT_CHARS)]

JsonObject = dict[str, Any]


class Body(BaseModel):
    """The body of a request. Fields that a dialect does not know are ignored, as its own server does."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    @abstractmethod
    def asked(self) -> Asked:
        """What the request asks for; raises `Refusal` where rankmill cannot do it."""

    @abstractmethod
    def answer(self, scored: Scored) -> object:
        """The body of the answer, for JSON."""


@dataclass(frozen=True)
class Dialect:
    """How a service words its errors.

    Attributes
    ----------
    name
        As metrics have it.
    error
        The body for a refusal with a status.
    statuses
        Statuses that differ from those in `STATUS`.
    """

    name: str
    error: Callable[[Refusal, int], JsonObject]
    statuses: Mapping[Kind, int] = field(default_factory=dict)

    def status(self, refusal: Refusal) -> int:
        """The HTTP status for a refusal."""
        return self.statuses.get(refusal.kind, STATUS[refusal.kind])


@dataclass(frozen=True)
class Form:
    """A body that a path takes, in one dialect."""

    dialect: Dialect
    body: type[Body]


@dataclass(frozen=True)
class Route:
    """A path to which texts to score are sent.

    Attributes
    ----------
    path, summary
        The path, and a line for the documentation.
    forms
        The bodies that it takes; the first is that of a body which is not even an object.
    choose
        Which form a JSON object has, where there are several.
    """

    path: str
    summary: str
    forms: tuple[Form, ...]
    choose: Callable[[JsonObject], Form] | None = None

    def form(self, body: JsonObject) -> Form:
        """The form of a body."""
        return self.choose(body) if self.choose else self.forms[0]
