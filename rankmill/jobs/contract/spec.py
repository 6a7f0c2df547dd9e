"""The score spec: the model and options of a run, equal for all of its workers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Literal, TypedDict

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from rankmill.jobs.contract.errors import SpecError, WireError
from rankmill.jobs.contract.prompts import MAX_TEMPLATE_CHARS, answers_of
from rankmill.jobs.contract.schema import Inputs

Precision = Literal[
    "auto", "fp32", "bf16", "fp16", "fp8",
    "int8", "int8-64", "int8-64-bf16", "int8-128", "int8-128-bf16", "int8-dynamic", "int8-dynamic-7bit",
    "int4",
]  # fmt: skip

OPEN_PRECISIONS = frozenset({"auto", "int8"})
"""What these stand for is measured on the machine, so the first worker of a run settles it for all."""

Activation = Literal["default", "identity", "sigmoid", "softmax", "probability"]

Long = Literal["truncate", "split", "split-mean", "refuse"]

Side = Literal["right", "left"]

CONTENT = re.compile(r"^[0-9a-f]{64}$")
"""Pattern of a digest of content; a commit of the hub has 40 characters."""

RECIPE = "rankmill_quantization.json"
"""File of a model directory that ``rankmill quantize`` writes: how workers compute the model in int8."""

RECIPE_FORMAT = 1
"""Version of this file; workers refuse any other."""


def all_labels_fit(asked: bool, info: ValidationInfo) -> bool:
    """Check ``all_labels`` with the fields before it; `ScoreSpec` and the settings have them."""
    if asked and info.data.get("label") is not None:
        raise PydanticCustomError("one_label", "label names one output: leave out one of the two")
    if asked and info.data.get("long") == "split":
        raise PydanticCustomError("windows", "the best window is that of one label: name it")
    return asked


def inputs_fit(inputs: Inputs, info: ValidationInfo) -> Inputs:
    """Check ``inputs`` with the fields before it, likewise."""
    if inputs == "pairs":
        return inputs
    for option in ("instruction", "prompt_template", "max_passage_tokens"):
        if info.data.get(option) is not None:
            message = "{option} is for pairs of a query and a passage: leave it out"
            raise PydanticCustomError("pairs_alone", message, {"option": option})
    if inputs == "conversations" and str(info.data.get("long")).startswith("split"):
        raise PydanticCustomError("whole", "conversations are not cut into windows: leave out long")
    if inputs == "conversations" and info.data.get("truncation_side"):
        raise PydanticCustomError(
            "side", "conversations are cut as the model's tokenizer does: leave out truncation_side"
        )
    return inputs


class ScoreSpec(BaseModel):
    """The model of a run and how it is applied.

    Attributes
    ----------
    model
        Hugging Face hub id, a directory on the worker's disk, or ``demo`` for the shipped model.
    revision
        Branch, tag or commit on the hub; ``None`` is the default branch. Of a directory or a version in a
        registry, the digest of its content; ``None``: whatever it holds.
    precision
        Number format of the forward pass; ``auto`` means the best one for the device. ``int8`` means the kind
        that is worth it there: inputs in groups of 64 or 128 with a scale each, the rest in fp32 or bf16.
    max_length
        Longest pair in tokens, special tokens included; longer pairs are truncated, the longer
        text first. ``None`` is the model's own limit.
    activation
        Function applied to the logit. ``default`` is the model's own, as
        ``sentence_transformers.CrossEncoder`` would apply it. ``softmax``: the model's own, then the
        softmax over its outputs. ``probability``: of logits, the softmax of several and the sigmoid of one.
    instruction
        What the model is asked to do: text in its prompt, or before each query, as
        ``CrossEncoder.predict(prompt=...)`` has it. ``None`` is the model's own, empty is none.
    prompt_template
        Jinja template of the prompt, in place of the model's own; ``none``: the two texts alone.
    label
        Name or number of the output that is the score, for a model with several.
    long
        What happens to passages, or texts that are scored alone, that are too long: ``truncate`` cuts off
        their end, ``split`` scores overlapping windows, of which the best counts; with ``split-mean`` it is
        the mean of their scores. ``refuse``: what is too long has an error.
    long_stride
        Tokens from the start of a window to the start of the next; ``None`` is half of a window.
    truncation_side
        Where texts that are too long are cut: their end (``right``), or their beginning. ``None``: as the
        model's tokenizer does, which is mostly the end.
    max_passage_tokens
        Longest passage in tokens; more are cut off, whatever room the model has. ``None``: no such limit.
    all_labels
        Whether each output of a model with several is a score: a row has as many scores then.
    deterministic
        Whether a score depends on its pair alone, bit for bit: not on the pairs beside it, their order,
        chunks, workers or threads, on devices of one kind.
    inputs
        What a row is: a query and a passage, a text that is scored alone, or a conversation. Of the last two
        the ``default`` activation is none, unless the model's files name one. ``tokens``: a `TokensAsked`,
        which gets no score but a `TokensFound`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(min_length=1)
    revision: str | None = None
    precision: Precision = "auto"
    max_length: int | None = Field(default=None, ge=4)
    activation: Activation = "default"
    instruction: str | None = Field(default=None, max_length=MAX_TEMPLATE_CHARS)
    prompt_template: str | None = Field(default=None, max_length=MAX_TEMPLATE_CHARS)
    label: str | None = Field(default=None, min_length=1, max_length=1000)
    long: Long = "truncate"
    long_stride: int | None = Field(default=None, ge=1)
    truncation_side: Side | None = None
    max_passage_tokens: int | None = Field(default=None, ge=1)
    all_labels: bool = False
    deterministic: bool = False
    inputs: Inputs = "pairs"

    _alone = field_validator("all_labels")(all_labels_fit)
    _inputs = field_validator("inputs")(inputs_fit)


class OtherSpecOptions(TypedDict, total=False):
    """As `SpecOptions`, but for ``all_labels``, which decides what a row's score is."""

    model: str
    revision: str | None
    precision: Precision
    max_length: int | None
    activation: Activation
    instruction: str | None
    prompt_template: str | None
    label: str | None
    long: Long
    long_stride: int | None
    truncation_side: Side | None
    max_passage_tokens: int | None
    deterministic: bool
    inputs: Inputs


class SpecOptions(OtherSpecOptions, total=False):
    """The fields of a `ScoreSpec` as options by name: ``**spec: Unpack[SpecOptions]``."""

    all_labels: bool


_SHOWN_OUTPUTS = 20


def choose_output(label: str | None, labels: Sequence[str], model: str) -> int | None:
    """Which of a model's outputs is the score; ``None`` if there is only one.

    Parameters
    ----------
    label
        Name or number of an output, as asked for.
    labels
        Names of the outputs, in order.
    model
        Name of the model.

    Raises
    ------
    SpecError
        The model has no such output, or has several and none was asked for.
    """
    names = ", ".join(f"{number}: {name}" for number, name in enumerate(labels[:_SHOWN_OUTPUTS]))
    names += ", and more" if len(labels) > _SHOWN_OUTPUTS else ""
    if label is None and len(labels) > 1:
        raise SpecError(
            f"model {model} has {len(labels)} outputs; name the one to score by with --label ({names}), "
            "or take all with --all-labels"
        )
    if label is None:
        return None
    numbers = [number for number, name in enumerate(labels) if name == label]
    numbers = numbers or [number for number, name in enumerate(labels) if name.lower() == label.lower()]
    if len(numbers) != 1 and label.isdecimal() and int(label) < len(labels):
        numbers = [int(label)]
    if len(numbers) != 1:
        raise SpecError(f"model {model} has no output {label!r}; it has {names}", option="label")
    return numbers[0] if len(labels) > 1 else None


def nearest(name: str, known: Iterable[str], written: Callable[[str], str] = str) -> str:
    """A hint at the `known` name most like `name`, in the form that `written` gives it; none if none is."""
    found = get_close_matches(name, known, n=1)
    return f", the nearest is {written(found[0])}" if found else ""


def complaint(error: ValidationError, known: Iterable[str]) -> str:
    """The fault in options given by name, in one line: mostly one that is not in `known`."""
    wrong = error.errors(include_url=False, include_input=False, include_context=False)
    for each in wrong:
        if each["type"] == "extra_forbidden":
            name = str(each["loc"][0])
            return f"{name}: there is no such option{nearest(name, known)}"
    return f"{'.'.join(map(str, wrong[0]['loc']))}: {wrong[0]['msg']}"


def settled(spec: ScoreSpec, precision: str) -> ScoreSpec:
    """`spec` with an open precision replaced by `precision`, which is a backend's name for it."""
    try:
        return ScoreSpec.model_validate({**spec.model_dump(), "precision": precision.partition(" ")[0]})
    except ValidationError:
        raise WireError(f"the run's precision in Redis is {precision!r:.40}, which does not exist") from None


WeightsKey = tuple[str, str | None, str, tuple[str, str | None] | None, bool, Inputs]


def weights_key(spec: ScoreSpec) -> WeightsKey:
    """The fields that decide how a model is loaded and proven; specs with equal fields share weights."""
    answers = answers_of(spec.prompt_template)
    return spec.model, spec.revision, spec.precision, answers, spec.deterministic, spec.inputs
