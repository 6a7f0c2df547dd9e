"""Base of the models of all text in Redis: each is validated as a whole when it is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from rankmill.jobs.contract.errors import FormatError, WireError

FORMAT = 2
"""Version of everything that producers and workers exchange; a reader refuses any other version."""

NEW_SPEC_FORMAT = 3
"""Version of a run whose spec has fields or values that format 2 does not have; all else stays at 2."""

EXTENDED_FORMAT = 5
"""Version of what says more than formats 2 and 3 can: a run with a tenant's weight, with the latest fields of
a spec, or with other rows than pairs; a payload of such rows; a result with the model's digest or proven
bound, or with the tokens of each row. Each is an optional field, so the features that need them change no
version again. A worker writes such a result only for a job whose metadata says that its producer reads this
version."""

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
"""A number of things that fits into a signed 64-bit column."""

Seconds = Annotated[float, Field(ge=0, lt=1e12)]
"""A duration, or a time since 1970."""

Weight = Annotated[float, Field(gt=0, le=1e6)]
"""How many times what others get a tenant gets."""

Scored = Literal["pairs", "texts", "conversations"]
"""What is scored: a query and a passage, one text, or a list of messages."""

Inputs = Literal[Scored, "tokens"]
"""What the rows of a run are: what is scored, or texts whose tokens are asked for (`TokensAsked`)."""

MAX_CHUNK_ROWS = 1 << 20
"""Most rows of a chunk."""


class WireModel(BaseModel):
    """Base of these models: an unknown field, a missing field or a wrong type is a `WireError`.

    A release that adds a field also changes `FORMAT`. The exception is a field that no older release
    has to read: it is listed in `added`, and may be missing in data from an older release of the same format.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    added: ClassVar[frozenset[str]] = frozenset()
    formats: ClassVar[frozenset[int]] = frozenset({FORMAT})
    """Versions that can be read."""

    @classmethod
    def read_json(cls, raw: bytes | str, what: str) -> Self:
        """Read JSON; `what` names the data in the message of a `WireError`."""
        try:
            found = from_json(raw)
        except ValueError as error:
            raise WireError(f"{what} is damaged: {error}") from None
        if not isinstance(found, dict):
            raise WireError(f"{what} is damaged: it is not a JSON object")
        return cls._read(found, what)

    @classmethod
    def read_fields(cls, raw: Mapping[bytes, bytes], what: str) -> Self:
        """Read the fields of a hash or of a stream entry; `what` as in `read_json`."""
        try:
            found = {name.decode(): value.decode() for name, value in raw.items()}
        except UnicodeDecodeError:
            raise WireError(f"{what} is damaged: it is not UTF-8") from None
        return cls._read(found, what)

    @classmethod
    def _read(cls, found: dict[str, Any], what: str) -> Self:
        written_as = str(found.pop("format", FORMAT))
        if written_as not in map(str, cls.formats):
            reads = " and ".join(map(str, sorted(cls.formats)))
            raise FormatError(
                f"{what} has format {written_as:.20}, this release reads {reads}: "
                "run the same rankmill release on producers and workers"
            )
        missing = sorted(cls.model_fields.keys() - cls.added - found.keys())
        if missing:
            raise WireError(f"{what} is damaged: it has no {', '.join(missing)}")
        try:
            return cls.model_validate(found)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise WireError(f"{what} is damaged: {where}: {first['msg']}") from None
