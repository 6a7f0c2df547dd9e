"""The options that say which files to score, and how, made from the fields of `FileRequest`."""

from __future__ import annotations

import functools
from typing import Any

import click
from pydantic import ValidationError

from rankmill.cli import options
from rankmill.jobs.contract.file_request import DATASET, FileRequest
from rankmill.jobs.runtime.settings import Settings

SETTINGS = (
    "revision", "precision", "max_length", "activation", "instruction", "prompt_template", "label",
    "all_labels", "long", "long_stride", "truncation_side", "max_passage_tokens", "deterministic", "queue",
    "tenant", "weight", "chunk_size",
)  # fmt: skip
"""Settings that say how files are scored, by the command itself or by runners."""

GROUPS = {
    "Most used": "output models top_k query_column passage_column",
    "Input": "text_column messages_column text_columns list_columns columns delimiter on_null "
    "limit shard reuse",
    "A run instead of pairs": "run queries corpus dataset queries_id queries_text corpus_id corpus_text "
    "on_duplicate depth qrels with_texts",
    "Output": "output_format rows_per_part score_column rank_column query_id_column passage_id_column tag "
    "mean force restart",
    "Model": "revision precision max_length activation instruction prompt_template label all_labels long "
    "long_stride truncation_side max_passage_tokens deterministic",
    "Workers": "redis_url workers device backend queue file_queue tenant weight chunk_size",
}
"""The options for files by group, as --help lists them."""


def file_options(function: options.Function) -> options.Function:
    """Add INPUT and the options of `FileRequest`; the command gets ``request`` and the setting ``model``."""

    @functools.wraps(function)
    def run(**given: Any) -> None:
        request = _take_request(given)
        function(request=request, **given)

    made: options.Function = run
    for name, option in reversed(options.made_of(FileRequest).items()):
        made = _OWN.get(name, option)(made)
        made = _DATASET(made) if name == "depth" else made
    return made


def _take_request(given: dict[str, Any]) -> FileRequest:
    """Remove the options of a request from `given`, and return the request; raises `UsageError` if they
    conflict.
    """
    dataset = given.pop("dataset")
    if dataset:
        if all(given[name] for name in ("run", "queries", "corpus")):
            raise click.UsageError("--dataset has no effect beside --run, --queries and --corpus")
        given["queries"], given["corpus"] = given["queries"] or (dataset,), given["corpus"] or (dataset,)
        given["run"] = given["run"] or dataset
    models = given.pop("models")
    given["model"] = models[0] if models else None
    fields = {name: given.pop(name) for name in list(given) if name in FileRequest.model_fields}
    fields["models"] = models if len(models) > 1 else ()
    try:
        return FileRequest(**fields)
    except ValidationError as error:
        where = "".join(f"{part}: " for part in error.errors()[0]["loc"][:1])
        raise click.UsageError(f"{where}{options.reason(error)}") from None


def refuse_stride(settings: Settings) -> None:
    """Raise `UsageError` if the command has ``--long-stride``, but passages are not split."""
    given = click.get_current_context().params
    if given["long_stride"] is not None and not settings.long.startswith("split"):
        raise click.UsageError("--long-stride has no effect without --long split")


def _dataset(context: click.Context, option: click.Parameter, given: str | None) -> str | None:
    if given is None or given.startswith(DATASET):
        return given
    raise click.BadParameter(f"{given!r} is not a dataset of ir_datasets, such as irds:beir/scifact/test")


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
"""Options of `FileRequest` that `made_of` cannot make from the type, default and help of their fields."""

_DATASET = click.option(
    "--dataset",
    metavar="irds:NAME",
    callback=_dataset,
    help="A dataset of ir_datasets: its queries, its passages and, without --run, its run.",
)
"""The option ``--dataset``, a short form of ``--run``, ``--queries`` and ``--corpus`` for one dataset."""
