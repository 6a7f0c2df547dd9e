"""A worker's proof that its scores differ from a reference by no more than a bound."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Way = Literal["alone", "packed", "shared", "padded", "equal"]
"""How the rows of a batch share a forward pass of the model.

- ``alone``: each row has a forward pass of its own.
- ``packed``: rows have no padding, and their shared prefixes are computed once if possible.
- ``shared``: the rows' shared prefixes are computed once.
- ``padded``: rows are padded to one length.
- ``equal``: rows have equal lengths.
"""

REFERENCES = {
    "exact": "transformers in fp32 on the CPU, each pair alone",
    "own": "transformers on the worker's device, in its precision (8 and 4 bits: in bf16), each pair alone",
}
"""What a model's scores can be compared with: each value of `Proof.reference` and its description."""

Figure = Annotated[float, Field(ge=0)]


class Proof(BaseModel):
    """How much a model's logits on one kind of device differ from a reference, measured with test pairs.

    Attributes
    ----------
    digest
        The SHA-256 of the model's files, or its commit on the hub; ``None`` if neither is known.
    backend, device, precision
        What computed the logits; ``device`` is a kind, such as ``cpu``.
    machine
        Name of the CPU or GPU, and the number of threads.
    release
        The release of rankmill.
    versions
        The versions of the packages that compute, by name.
    way
        How the rows of a batch share a forward pass on this device.
    reference
        What the scores were compared with: a key of `REFERENCES`.
    probes, longest
        The number of test pairs, and the number of tokens of the longest test pair.
    rows, tokens
        The most rows, and the most padded tokens, of the batches that were compared. Larger batches are
        compared before their scores are returned.
    difference
        Largest difference from the reference.
    company
        Largest change of a logit that padding or other rows in the batch cause.
    own
        Error of transformers itself. If `reference` is ``own`` and `precision` has at least 16 bits, this is
        the largest change of transformers' logits that padding causes. Otherwise it is the largest difference
        between transformers' logits in `precision` and the reference.
    bound
        Largest value that is allowed for ``difference`` and ``company``.
    wrong
        What is wrong apart from the figures, such as a test pair with other tokens than in the reference;
        ``None`` if nothing is.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    digest: str | None
    backend: str
    device: str
    precision: str
    machine: str
    release: str
    versions: dict[str, str]
    way: Way
    reference: Literal["exact", "own"]
    probes: int = Field(ge=1)
    longest: int = Field(ge=1)
    rows: int = Field(ge=0)
    tokens: int = Field(ge=0)
    difference: Figure
    company: Figure
    own: Figure
    bound: Figure
    wrong: str | None = None

    @property
    def holds(self) -> bool:
        return self.wrong is None and max(self.difference, self.company) <= self.bound

    def __str__(self) -> str:
        wrong = f"{self.wrong}; " if self.wrong else ""
        return (
            f"{self.backend} {self.precision} on {self.device}, {self.way}: {wrong}differs by "
            f"{self.difference:.2g} from {REFERENCES[self.reference]} (allowed: {self.bound:.2g}), by "
            f"{self.company:.2g} with the pairs beside it ({self.probes} pairs)"
        )
