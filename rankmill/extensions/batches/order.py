"""Describes a batch to the runner (a process that scores submitted files) that carries it out."""

from __future__ import annotations

import re
from typing import Annotated, Any, Self

from pydantic import Field

from rankmill.jobs.contract.errors import InputError, WireError
from rankmill.jobs.contract.file_request import FileOrder, FileRequest, Name
from rankmill.jobs.contract.schema import WireModel

KIND = "batch"
"""Value of `FileOrder.kind` for batches, and name of their entry point in the group ``rankmill.orders``."""


_OPTION = re.compile(r"--([a-z][a-z-]*)")


def with_fields(message: str) -> str:
    """Name score-file's options in a message as callers know them: ``--top-k`` becomes ``pairs.top_k``."""

    def field(option: re.Match[str]) -> str:
        name = option[1].replace("-", "_")
        return f"pairs.{name}" if name in FileRequest.model_fields else option[0]

    return _OPTION.sub(field, message)


class BatchOrder(WireModel):
    """What a runner must know about a batch. `FileOrder.request` names the batch's input and output files.

    Attributes
    ----------
    endpoint
        Path of the API that handles the requests in the input, such as ``/v1/score``. ``None`` if the input
        has rows.
    owner
        Owner of the batch and of its input file: the name of API keys, or empty without a key.
    model, asked
        What every line must ask for: the model, and the other fields of the spec.
    default
        The model of lines that do not name one.
    kept
        Seconds for which the batch's output and errors are kept.
    """

    optional = frozenset({"endpoint", "model", "default", "asked"})

    id: Name
    owner: str
    endpoint: Name | None = None
    model: Name | None = None
    default: Name | None = None
    asked: dict[str, str | int | None] = Field(default_factory=dict)
    kept: Annotated[int, Field(ge=1)]

    @classmethod
    def of(cls, order: FileOrder) -> Self:
        """Read the facts about a batch from a runner's job. Raises `InputError` if they are not valid."""
        try:
            return cls._read(dict(order.details), "the order of a batch")
        except WireError as error:
            raise InputError(str(error)) from None

    def of_order(self) -> dict[str, Any]:
        return {"kind": KIND, "details": self.model_dump(mode="json")}
