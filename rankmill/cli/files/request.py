"""The options that say which files are scored and how, made from the fields of `FileRequest`."""

from __future__ import annotations

import functools
from typing import Any

import click
from pydantic import TypeAdapter, ValidationError

from rankmill.cli import options
from rankmill.jobs.protocol.submitted.request import DATASET, FileRequest

SETTINGS = (
    "revision", "precision", "max_length", "activation", "instruction", "prompt_template", "label",
    "all_labels", "long", "long_stride", "queue", "chunk_size",
)  # fmt: skip
"""Settings that say how files are scored, wherever that is."""


def file_options(function: options.Function) -> options.Function:
    """INPUT and the options of `FileRequest`: the command gets the ``request``, and the setting ``model``."""

    @functools.wraps(function)
    def run(**given: Any) -> None:
        request = _take_request(given)
        function(request=request, **given)

    made: options.Function = run
    for name, field in reversed(FileRequest.model_json_schema()["properties"].items()):
        made = (_OWN.get(name) or _option(name, field))(made)
        made = _DATASET(made) if name == "depth" else made
    return made


def _take_request(given: dict[str, Any]) -> FileRequest:
    """Take the request out of the options `given`; raises `UsageError` if its parts do not fit."""
    dataset = given.pop("dataset")
    if dataset:
        if all(given[name] for name in ("run", "queries", "corpus")):
            raise click.UsageError("--dataset has no effect beside --run, --queries and --corpus")
        given["queries"], given["corpus"] = given["queries"] or (dataset,), given["corpus"] or (dataset,)
        given["run"] = given["run"] or dataset
    models = given.pop("models")
    given["model"] = models[0] if models else None
    asked = {name: given.pop(name) for name in list(given) if name in FileRequest.model_fields}
    asked["models"] = models if len(models) > 1 else ()
    try:
        return FileRequest(**asked)
    except ValidationError as error:
        where = "".join(f"{part}: " for part in error.errors()[0]["loc"][:1])
        raise click.UsageError(f"{where}{_reason(error)}") from None


def _option(name: str, field: dict[str, Any]) -> options.Option:
    """The option of a field with this JSON schema."""
    kind = field.get("anyOf", [field])[0]  # of a field that may be None
    text = " ".join(field["description"].split()).replace(" [default:", "  [default:")
    own: dict[str, Any] = {"metavar": kind.get("title")}
    default = field["default"]
    if kind["type"] == "boolean":
        own = {"is_flag": True}
    elif kind["type"] == "integer":
        own = {"metavar": "N", "type": click.IntRange(kind["minimum"], kind.get("maximum"))}
    elif "enum" in kind:
        own = {"type": click.Choice(kind["enum"])}
    elif default == []:
        own |= {"multiple": True, "callback": _split if own["metavar"].endswith(",...") else None}
        default = None
    else:
        own["callback"] = _checked
    flags = (*(["-o"] if name == "output" else []), f"--{name.replace('_', '-')}")
    own |= {"default": default, "show_default": isinstance(default, str)}
    return click.option(*flags, name, help=text, **own)


def _split(context: click.Context, option: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    """The names in all uses of an option, each of which is a list separated by commas."""
    return tuple(name for names in given for name in names.split(",") if name)


def _checked(context: click.Context, option: click.Parameter, given: str | None) -> Any:
    """The value of one field, which must be right."""
    field = FileRequest.model_fields[str(option.name)]
    try:
        return TypeAdapter(field.rebuild_annotation()).validate_python(given)
    except ValidationError as error:
        raise click.BadParameter(_reason(error)) from None


def _dataset(context: click.Context, option: click.Parameter, given: str | None) -> str | None:
    if given is None or given.startswith(DATASET):
        return given
    raise click.BadParameter(f"{given!r} is no dataset of ir_datasets, such as irds:beir/scifact/test")


def _reason(error: ValidationError) -> str:
    return error.errors()[0]["msg"].removeprefix("Value error, ")


_OWN: dict[str, options.Option] = {
    "inputs": click.argument("inputs", nargs=-1, metavar="INPUT..."),
    "models": click.option(
        "--model",
        "models",
        multiple=True,
        metavar="TEXT",
        help=f"{options.HELP['model']} Several: a column for each.  [default: {options.DEFAULTS['model']}]",
    ),
}
"""Fields that are no plain options: the first model is a setting, too."""

_DATASET = click.option(
    "--dataset",
    metavar="irds:NAME",
    callback=_dataset,
    help="A dataset of ir_datasets: its queries, its passages and, without --run, its run.",
)
"""Stands for the run, the queries and the corpus, after which it is listed."""
