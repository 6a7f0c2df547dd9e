"""The score spec: the model and options of a run, which are the same for all of its workers."""

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
"""Precisions that leave the number format open, because the best format depends on the machine. The first
worker of a run chooses the number format for the whole run.
"""

Activation = Literal["default", "identity", "sigmoid", "softmax", "probability"]

Long = Literal["truncate", "split", "split-mean", "refuse"]

Side = Literal["right", "left"]

CONTENT = re.compile(r"^[0-9a-f]{64}$")
"""Matches the SHA-256 digest of a model's content. A commit on the hub, which has only 40 characters, does
not match.
"""

RECIPE = "rankmill_quantization.json"
"""File in a model's directory that ``rankmill quantize`` writes; it says how workers compute the model in
int8.
"""

RECIPE_FORMAT = 1
"""Version of the format of the file `RECIPE`; workers refuse a file with any other version."""


def all_labels_fit(value: bool, info: ValidationInfo) -> bool:
    """Check that the option ``all_labels`` does not contradict another option, such as ``label``."""
    if value and info.data.get("label") is not None:
        raise PydanticCustomError("one_label", "label names one output: leave out one of the two")
    if value and info.data.get("long") == "split":
        raise PydanticCustomError("windows", "the best window is that of one label: name it")
    return value


def inputs_fit(inputs: Inputs, info: ValidationInfo) -> Inputs:
    """Check that the other options fit the kind of rows. For example, ``instruction`` is only for pairs."""
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
    """The model of a run, and how it is applied.

    Attributes
    ----------
    model
        An id on the Hugging Face hub, a directory on the worker's disk, or ``demo``, which is the shipped
        model. Or a name that an extension knows, for example of a version in a registry.
    revision
        Branch, tag or commit on the hub; ``None`` is the default branch. For a directory or a version in a
        registry, the digest of its content; ``None`` accepts any content.
    precision
        Number format of the forward pass. ``auto`` means the best format for the device. ``int8`` means a
        kind of int8 that is fast on the device; if no kind is fast there, ``int8`` means the same as
        ``auto``. In ``int8-64`` and ``int8-128``, 64 or 128 inputs share a scale. All that is not in int8 is
        in fp32, or in bf16 if the name ends with ``-bf16``.
    max_length
        Longest row in tokens, special tokens included. In a pair that is too long, the longer text is cut
        first. ``None`` is the model's own limit.
    activation
        Function applied to the logit. ``default`` is the model's own function, as
        ``sentence_transformers.CrossEncoder`` would apply it. ``softmax`` applies the model's own function,
        and then the softmax over the outputs. ``probability`` is the softmax of several logits, or the
        sigmoid of a single one. But if the model's config says ``multi_label_classification``,
        ``probability`` is the sigmoid of each logit.
    instruction
        What the model is asked to do. This text stands in the prompt or before each query, as in
        ``CrossEncoder.predict(prompt=...)``. ``None`` is the model's own instruction; empty means no
        instruction.
    prompt_template
        Jinja template of the prompt, in place of the model's own; ``none`` means only the two texts.
    label
        Name or number of the output that is the score, for a model with several outputs.
    long
        What happens to a passage or single text that is too long. ``truncate`` cuts it. ``split`` scores
        overlapping windows of the text, and the best score counts. ``split-mean`` takes the mean of these
        scores. ``refuse`` gives the row an error.
    long_stride
        Tokens from the start of a window to the start of the next; ``None`` is half of a window.
    truncation_side
        The side at which long texts are cut: the end (``right``) or the beginning (``left``). With ``None``,
        the model's tokenizer decides; most tokenizers cut the end.
    max_passage_tokens
        Longest passage in tokens; the rest is cut off even if the model has room. ``None`` means no such
        limit.
    all_labels
        Whether each output of a model is a score, so that a row has several scores.
    deterministic
        Whether a row's score always has the same bits on devices of one kind. If so, the bits do not depend
        on the other rows, on their order, or on the number of chunks, workers and threads.
    inputs
        What a row is: a query and a passage, a single text, or a conversation. For texts and conversations,
        the ``default`` activation is the identity, unless the model's files name another function. With
        ``tokens``, a row is a `TokensAsked`, and gets a `TokensFound` instead of a score.
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
    """The fields of a `ScoreSpec` as options by name. ``all_labels`` is left out, because it decides how many
    scores a row has.
    """

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
    """Return the index of the output that is the score, or ``None`` if the model has only one output.

    Parameters
    ----------
    label
        Name or number of the output that was asked for.
    labels
        Names of the outputs, in order.
    model
        Name of the model.

    Raises
    ------
    SpecError
        The model does not have this output, or it has several outputs and `label` is ``None``.
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


def nearest(name: str, names: Iterable[str], written: Callable[[str], str] = str) -> str:
    """Return a hint for a misspelt name: ``, the nearest is model``. The hint is empty if no name is similar.

    Parameters
    ----------
    name
        The misspelt name.
    names
        The names that exist.
    written
        Formats the most similar name for the hint.
    """
    matches = get_close_matches(name, names, n=1)
    return f", the nearest is {written(matches[0])}" if matches else ""


def complaint(error: ValidationError, names: Iterable[str]) -> str:
    """Return one line that says what is wrong with an option.

    For an unknown option, the line suggests the most similar of `names`.
    """
    wrong = error.errors(include_url=False, include_input=False, include_context=False)
    for problem in wrong:
        if problem["type"] == "extra_forbidden":
            name = str(problem["loc"][0])
            return f"{name}: there is no such option{nearest(name, names)}"
    return f"{'.'.join(map(str, wrong[0]['loc']))}: {wrong[0]['msg']}"


def in_precision(spec: ScoreSpec, precision: str) -> ScoreSpec:
    """Return a copy of `spec` with another precision, which is the first word of `precision`.

    Raises
    ------
    WireError
        The first word is not a precision.
    """
    try:
        return ScoreSpec.model_validate({**spec.model_dump(), "precision": precision.partition(" ")[0]})
    except ValidationError:
        raise WireError(f"the run's precision in Redis is {precision!r:.40}, which does not exist") from None


WeightsKey = tuple[str, str | None, str, tuple[str, str | None] | None, bool, Inputs]


def weights_key(spec: ScoreSpec) -> WeightsKey:
    """Return those fields of a spec that decide how the model is loaded, and how scores are checked.

    Specs with equal fields share one copy of the weights.
    """
    answers = answers_of(spec.prompt_template)
    return spec.model, spec.revision, spec.precision, answers, spec.deterministic, spec.inputs
