"""What an order for runners says about a batch."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field

from rankmill.jobs.contract.errors import InputError, WireError
from rankmill.jobs.contract.file_request import FileOrder, Name
from rankmill.jobs.contract.schema import WireModel

KIND = "batch"
"""The kind of the order, which is the name of its entry point in ``rankmill.orders``."""


class BatchOrder(WireModel):
    """A batch of the gateway. The only input of the order's request is the batch's input, and the request's
    output gets the answers.

    Attributes
    ----------
    endpoint
        Path of the API to which each line of the input is a request; ``None`` if the input has rows to score.
    owner
        Name of the API keys that own the batch; empty if it was submitted without a key.
    model, asked
        The model and the other fields of the spec that all lines name.
    default
        The model of lines that do not name one.
    kept
        Seconds for which the files that the batch makes are kept.
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
        """Read the batch from an order; raises `InputError` if it is not valid."""
        try:
            return cls._read(dict(order.details), "the order of a batch")
        except WireError as error:
            raise InputError(str(error)) from None

    def of_order(self) -> dict[str, Any]:
        return {"kind": KIND, "details": self.model_dump(mode="json")}
