"""What crosses Redis as text: models that are read as a whole, or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from jobs.errors import FormatError, WireError

FORMAT = 2
"""Version of all that producers and workers write for each other; a reader refuses any other."""

Count = Annotated[int, Field(ge=0, lt=1 << 63)]
"""A number of things, which a signed 64-bit column can hold."""

Seconds = Annotated[float, Field(ge=0, lt=1e12)]
"""A duration, or a time since 1970."""


class WireModel(BaseModel):
    """Base of these models: a field that is unknown, missing, or of another type, is a `WireError`.

    A release that adds a field also changes `FORMAT`, unless older ones never read the rest; such
    fields are `added`, and may be missing in what an older release of the same format has written.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    added: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def read_json(cls, raw: bytes | str, what: str) -> Self:
        """Read JSON; `what` it should be is for the message of the `WireError`."""
        try:
            found = from_json(raw)
        except ValueError as error:
            raise WireError(f"{what} is damaged: {error}") from None
        if not isinstance(found, dict):
            raise WireError(f"{what} is damaged: it is no JSON object")
        return cls._read(found, what)

    @classmethod
    def read_fields(cls, raw: Mapping[bytes, bytes], what: str) -> Self:
        """Read the fields of a hash or of a stream's entry; `what` as in `read_json`."""
        try:
            found = {name.decode(): value.decode() for name, value in raw.items()}
        except UnicodeDecodeError:
            raise WireError(f"{what} is damaged: it is not UTF-8") from None
        return cls._read(found, what)

    @classmethod
    def _read(cls, found: dict[str, Any], what: str) -> Self:
        written_as = str(found.pop("format", FORMAT))
        if written_as != str(FORMAT):
            raise FormatError(
                f"{what} has format {written_as:.20}, this release reads {FORMAT}: "
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
