"""The base class of the messages that processes exchange as JSON or as fields of a Redis hash. Readers
validate all fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from rankmill.jobs.contract.errors import FormatError, WireError

FORMAT = 1
"""Version of the format of all data that processes exchange, or keep for other processes. Readers refuse any
other version.
"""

Count = Annotated[int, Field(ge=0, lt=1 << 63)]

Seconds = Annotated[float, Field(ge=0, lt=1e12)]
"""A duration in seconds, or a time in seconds since 1970."""

Weight = Annotated[float, Field(gt=0, le=1e6)]
"""Relative share of the workers: 2.0 gets twice as much as 1.0."""

Scored = Literal["pairs", "texts", "conversations"]

Inputs = Literal[Scored, "tokens"]
"""What the rows of a run are: something to score, or requests for tokens (`TokensAsked`)."""

MAX_CHUNK_ROWS = 1 << 20


def none_if_empty(value: object) -> object:
    """Turn an empty text into ``None``. The fields of a Redis hash cannot be ``None``, so they are empty."""
    return None if value == "" else value


def check_format(written_as: object, subject: str) -> None:
    """Raise `FormatError` if the format of data is not `FORMAT`.

    Parameters
    ----------
    written_as
        The format of the data.
    subject
        What the data are, for the error message.
    """
    if str(written_as) != str(FORMAT):
        raise FormatError(
            f"{subject} has format {written_as!s:.20}, this release reads {FORMAT}: "
            "run the same rankmill release on producers and workers"
        )


class WireModel(BaseModel):
    """Base of the models that processes exchange. Reading raises `WireError` for an unknown, missing or
    invalid field.

    A release that changes what fields may contain also changes `FORMAT`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    optional: ClassVar[frozenset[str]] = frozenset()
    """Fields that data may lack; the model then has the defaults of these fields."""

    def written(self) -> str:
        return f'{{"format": {FORMAT}, {self.model_dump_json()[1:]}'

    @classmethod
    def read_json(cls, raw: bytes | str, subject: str) -> Self:
        """Read JSON. In the message of a `WireError`, `subject` names the data, such as ``run 0af``."""
        try:
            fields = from_json(raw)
        except ValueError as error:
            raise WireError(f"{subject} is damaged: {error}") from None
        if not isinstance(fields, dict):
            raise WireError(f"{subject} is damaged: it is not a JSON object")
        return cls._read(fields, subject)

    @classmethod
    def read_fields(cls, raw: Mapping[bytes, bytes], subject: str) -> Self:
        """Read the fields of a hash or stream entry. In the message of a `WireError`, `subject` names the
        data.
        """
        try:
            fields = {name.decode(): value.decode() for name, value in raw.items()}
        except UnicodeDecodeError:
            raise WireError(f"{subject} is damaged: it is not UTF-8") from None
        return cls._read(fields, subject)

    @classmethod
    def _read(cls, fields: dict[str, Any], subject: str) -> Self:
        check_format(fields.pop("format", FORMAT), subject)
        missing = sorted(cls.model_fields.keys() - cls.optional - fields.keys())
        if missing:
            raise WireError(f"{subject} is damaged: it has no {', '.join(missing)}")
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise WireError(f"{subject} is damaged: {where}: {first['msg']}") from None
