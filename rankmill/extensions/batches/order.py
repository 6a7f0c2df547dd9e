"""The part of a runner's order that describes a batch."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field

from rankmill.jobs.contract.errors import InputError, WireError
from rankmill.jobs.contract.file_request import FileOrder, Name
from rankmill.jobs.contract.schema import WireModel

KIND = "batch"
"""The field ``kind`` in a runner's order, if the order is to carry out a batch. The entry point in
``rankmill.orders`` by which runners find `BatchOrders` has the same name.
"""


class BatchOrder(WireModel):
    """The details of a runner's order to carry out a batch. The order's `FileRequest` has the batch's input
    file as its only input, and the file for the answers as its output.

    Attributes
    ----------
    endpoint
        Path of the API to which each line of the input is a request; ``None`` if the input has rows to score.
    owner
        The owner of the batch, who is also the owner of the batch's input file: the name of API keys, or
        empty if the input file was uploaded without a key.
    model, asked
        The model, and the other fields of the spec, that every line must ask for.
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
        """Read the details of a batch from a runner's order; raises `InputError` if they are not valid."""
        try:
            return cls._read(dict(order.details), "the order of a batch")
        except WireError as error:
            raise InputError(str(error)) from None

    def of_order(self) -> dict[str, Any]:
        return {"kind": KIND, "details": self.model_dump(mode="json")}
