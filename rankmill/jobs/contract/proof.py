"""A worker's proof that its scores are the model's own, within a bound."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Way = Literal["alone", "packed", "shared", "padded", "equal"]
"""How rows share a forward: not at all; without padding, and beginnings once if that can be; what they begin
with in common once; padded to one length; only rows of equal lengths together."""

REFERENCES = {
    "exact": "transformers in fp32 on the CPU, each pair alone",
    "own": "transformers on the worker's device, in its precision (8 and 4 bits: in bf16), each pair alone",
}
"""What scores were compared with, by the values of `Proof.reference`."""

Figure = Annotated[float, Field(ge=0)]


class Proof(BaseModel):
    """The measured differences of logits of one model on one kind of device, with probe pairs.

    Attributes
    ----------
    digest
        The SHA-256 of all bytes of the model, or its commit on the hub; ``None`` if nothing names them.
    backend, device, precision
        As in a chunk's statistics; ``device`` is its kind (``cpu``).
    machine
        Name of the CPU or GPU, and the number of threads.
    release
        Of rankmill.
    versions
        Of the packages that compute, by name.
    way
        How rows share a forward here.
    reference
        What the scores were compared with: a key of `REFERENCES`.
    probes, longest
        How many pairs were scored, and tokens of the longest of them.
    rows, tokens
        The most rows, and the most padded tokens, of a batch that was compared; larger ones are compared
        before they are answered.
    difference
        Largest difference from the reference.
    company
        How much a logit changes, at most, with padding and the pairs beside it.
    own
        Largest difference that transformers itself has in this precision from its fp32, on the same pairs.
    bound
        The largest difference that is allowed: what the worker promises.
    spearman
        Rank correlation with the reference.
    wrong
        What no figure says: a probe has other tokens, no score, or another score for the same logit.
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
    spearman: float = Field(ge=-1, le=1)
    wrong: str | None = None

    @property
    def holds(self) -> bool:
        """Whether scores may be served so."""
        return self.wrong is None and max(self.difference, self.company) <= self.bound

    def __str__(self) -> str:
        """One line for a log."""
        wrong = f"{self.wrong}; " if self.wrong else ""
        return (
            f"{self.backend} {self.precision} on {self.device}, {self.way}: {wrong}differs by "
            f"{self.difference:.2g} from {REFERENCES[self.reference]} (allowed: {self.bound:.2g}), by "
            f"{self.company:.2g} with the pairs beside it; Spearman {self.spearman:.4f} ({self.probes} pairs)"
        )
