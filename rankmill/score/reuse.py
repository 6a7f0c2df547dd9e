"""Reads the scores of an earlier output of the same model (``--reuse``)."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ValidationError

from rankmill.jobs.cache import cache_folder
from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.contract.file_request import FileRequest
from rankmill.jobs.contract.spec import OPEN_PRECISIONS
from rankmill.jobs.model_names import ModelNames
from rankmill.jobs.runtime.settings import Settings
from rankmill.producer.collect.scored import EarlierScores, read_earlier
from rankmill.producer.files.formats.parquet import metadata_of, scored_rows
from rankmill.producer.files.manifest import content_here
from rankmill.producer.files.outputs import option_of
from rankmill.producer.files.stores.paths import AnyPath, as_path
from rankmill.score.input import text_columns
from rankmill.score.output import named_columns
from rankmill.score.summary import Tally, metadata

_COMPARED = (
    "revision",  # named first, because another revision explains most other differences
    "model", "precision", "max_length", "activation", "instruction", "prompt_template", "label", "long",
    "long_stride", "all_labels", "deterministic", "truncation_side", "max_passage_tokens", "inputs",
    "query_column", "passage_column", "text_column", "score_column",
)  # fmt: skip
"""Metadata that must be the same in the earlier output (``--reuse``) and in the new one. The error message
names the first that differs.
"""

_OPEN = {"revision", "precision"}
"""Metadata that the settings may leave open. The run then takes them from the earlier output
(``--reuse``).
"""


def earlier_scores(request: FileRequest, settings: Settings) -> tuple[Settings, EarlierScores | None]:
    """Read the scores of an earlier output (``--reuse``).

    Returns the scores, and the settings with the earlier output's revision and precision. Without
    ``--reuse``, returns the unchanged settings and ``None``.

    Raises
    ------
    InputError
        The output does not exist or is damaged, or this run would make other scores.
    """
    if request.reuse is None:
        return settings, None
    path, made = made_earlier(request.reuse, "--reuse")
    # A name such as NAME@ALIAS is replaced by the name of the model that it stands for now.
    pinned = ModelNames(settings).pinned(settings.spec())
    named = settings.model_copy(update={"model": pinned.model, "revision": pinned.revision})
    wanted = metadata(named, Tally()) | named_columns(request)
    if content := content_here(settings.model, cache_folder(settings.cache_dir)):
        wanted["rankmill.revision"] = content
    if settings.precision in OPEN_PRECISIONS:
        wanted["rankmill.precision"] = ""
    _check_same(made, wanted, str(path))
    taken = {"precision": made.get("rankmill.precision"), "revision": made.get("rankmill.revision") or None}
    try:
        settings = settings.changed(taken)
    except ValidationError:
        raise InputError(
            f"{path}: its scores cannot be used, because no run has precision "
            f"{taken['precision']}; leave out --reuse"
        ) from None
    texts, score = text_columns(request).sent, request.score_column
    scored = scored_rows(path, (*texts, score), "--reuse")
    return settings, read_earlier(scored.batches, texts, score, made)


def made_earlier(name: str, option: str) -> tuple[AnyPath, dict[str, str]]:
    """Return the path of an earlier output, and its metadata, which say how its scores were made.

    Parameters
    ----------
    name, option
        The output, and the option that names it, for messages.

    Raises
    ------
    InputError
        The file does not exist, or it is not a Parquet output of score-file.
    """
    path = as_path(name)
    if not path.is_file():
        raise InputError(f"{path}: no such file ({option})")
    try:
        made = metadata_of(path)
    except InputError as error:
        raise InputError(f"{path}: {option} needs Parquet: {str(error).removeprefix(f'{path}: ')}") from None
    if "rankmill.version" not in made:
        raise InputError(f"{path}: {option} needs an output of score-file, which says how it was made")
    return path, made


def _check_same(made: Mapping[str, str], wanted: Mapping[str, str], name: str) -> None:
    """Check that this run would score the same texts in the same way as the earlier run (``--reuse``).

    Parameters
    ----------
    made
        Metadata of the earlier output.
    wanted
        Metadata of this run's output. A revision or precision that is empty here is not compared.
    name
        Name of the earlier output, for messages.

    Raises
    ------
    InputError
        An entry of `_COMPARED` differs. Or `made` does not say which content of a model made the scores.
    """
    revision = made.get("rankmill.revision", "")
    if not revision and made.get("rankmill.model") != "demo":
        raise InputError(
            f"{name}: its scores cannot be used, because it does not say which commit or content the "
            "model had; leave out --reuse"
        )
    for option in _COMPARED:
        given, expected = option_of(made, option), option_of(wanted, option)
        if option == "model" and revision and revision == wanted.get("rankmill.revision"):
            continue  # a model of this revision has the same files, even in another directory
        if given != expected and (expected or option not in _OPEN):
            raise InputError(
                f"{name}: its scores cannot be used, because they are of another {option.replace('_', ' ')}: "
                f"{shown_value(given)}, not {shown_value(expected)}; leave out --reuse"
            )


def shown_value(value: object) -> object:
    """Return the value of an option as messages show it."""
    return "none" if value is None else "''" if value == "" else value
