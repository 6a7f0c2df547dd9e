"""The score spec: the model and options of a run, equal for all of its workers."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from jobs.errors import WireError

Precision = Literal["auto", "fp32", "bf16", "fp16", "int8", "int4"]
Activation = Literal["default", "identity", "sigmoid"]

RECIPE = "rankmill_quantization.json"
"""File of a model directory that ``rankmill quantize`` writes: how workers compute the model in int8."""

RECIPE_FORMAT = 1
"""Version of this file; workers refuse any other."""


class ScoreSpec(BaseModel):
    """The model of a run and how it is applied.

    Attributes
    ----------
    model
        Hugging Face hub id, a directory on the worker's disk, or ``demo`` for the shipped model.
    revision
        Branch, tag or commit on the hub; ``None`` is the default branch.
    precision
        Number format of the forward pass; ``auto`` means the best one for the device.
    max_length
        Longest pair in tokens, special tokens included; longer pairs are truncated, the longer
        text first. ``None`` is the model's own limit.
    activation
        Function applied to the logit. ``default`` is the model's own, as
        ``sentence_transformers.CrossEncoder`` would apply it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(min_length=1)
    revision: str | None = None
    precision: Precision = "auto"
    max_length: int | None = Field(default=None, ge=4)
    activation: Activation = "default"


def settled(spec: ScoreSpec, precision: str) -> ScoreSpec:
    """`spec` with ``auto`` replaced by `precision`, which is a backend's name for it ("int8 weights")."""
    try:
        return ScoreSpec.model_validate({**spec.model_dump(), "precision": precision.partition(" ")[0]})
    except ValidationError:
        raise WireError(f"the run's precision in Redis is {precision!r:.40}, which does not exist") from None


WeightsKey = tuple[str, str | None, str]


def weights_key(spec: ScoreSpec) -> WeightsKey:
    """Model, revision and precision: specs that agree in these share their weights."""
    return spec.model, spec.revision, spec.precision
