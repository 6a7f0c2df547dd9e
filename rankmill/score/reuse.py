"""Reads the scores of an earlier output of the same model (``--reuse``)."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ValidationError

from rankmill.jobs.cache import cache_folder
from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.contract.file_request import FileRequest
from rankmill.jobs.contract.spec import OPEN_PRECISIONS
from rankmill.jobs.runtime.settings import Settings
from rankmill.producer.collect.repeats import EarlierScores, read_earlier
from rankmill.producer.files.formats.parquet import metadata_of, scored_rows
from rankmill.producer.files.manifest import content_here
from rankmill.producer.files.outputs import bound_of, option_of
from rankmill.producer.files.stores.paths import as_path
from rankmill.score.input import text_columns
from rankmill.score.output import named_columns
from rankmill.score.summary import Tally, metadata

_COMPARED = (
    "revision",  # first, because another revision explains most other differences
    "model", "precision", "max_length", "activation", "instruction", "prompt_template", "label", "long",
    "long_stride", "all_labels", "deterministic", "truncation_side", "max_passage_tokens", "inputs",
    "query_column", "passage_column", "text_column", "score_column",
)  # fmt: skip
"""Metadata that must be equal in the output that ``--reuse`` names and in the new output: how and from which
texts scores are made, and which column has the scores. The error message names the first that differs.
"""

_OPEN = {"revision", "precision"}
"""Metadata that a run's settings may leave open. With ``--reuse``, the run takes the open values from the
output that ``--reuse`` names.
"""


def earlier_scores(request: FileRequest, settings: Settings) -> tuple[Settings, EarlierScores | None]:
    """Read the scores of the output that ``--reuse`` names. Returns two values: `settings`, changed to the
    revision and the precision of this output, and the scores.

    Without ``--reuse``, returns the unchanged `settings` and ``None``.

    Raises
    ------
    InputError
        The output does not exist or is damaged, or this run would make other scores.
    """
    if request.reuse is None:
        return settings, None
    path = as_path(request.reuse)
    if not path.is_file():
        raise InputError(f"{path}: no such file (--reuse)")
    try:
        made = metadata_of(path)
    except InputError as error:
        raise InputError(f"{path}: --reuse needs Parquet: {str(error).removeprefix(f'{path}: ')}") from None
    wanted = metadata(settings, Tally()) | named_columns(request)
    if content := content_here(settings.model, cache_folder(settings.cache_dir)):
        wanted["rankmill.revision"] = content
    if settings.precision in OPEN_PRECISIONS:
        wanted["rankmill.precision"] = ""
    _check_same(made, wanted, str(path))
    bound_of(made, str(path))  # a damaged bound raises now, not when all rows are scored
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


def _check_same(made: Mapping[str, str], wanted: Mapping[str, str], name: str) -> None:
    """Check that this run would score the same texts in the same way as the output that ``--reuse`` names.

    Parameters
    ----------
    made
        Metadata of the output that ``--reuse`` names.
    wanted
        Metadata of the run's own output. A revision or precision that is empty here is not compared.
    name
        Name of the output of ``--reuse``, for messages.

    Raises
    ------
    InputError
        An entry of `_COMPARED` differs. Or `made` does not say which release or which content of a model
        made the scores.
    """
    if "rankmill.version" not in made:
        raise InputError(f"{name}: --reuse needs an output of score-file, which says how it was made")
    revision = made.get("rankmill.revision", "")
    if not revision and made.get("rankmill.model") != "demo":
        raise InputError(
            f"{name}: its scores cannot be used, because it does not say which commit or content the "
            "model had; leave out --reuse"
        )
    for option in _COMPARED:
        given, expected = option_of(made, option), option_of(wanted, option)
        if option == "model" and revision and revision == wanted.get("rankmill.revision"):
            continue  # the same files may be in another directory
        if given != expected and (expected or option not in _OPEN):
            raise InputError(
                f"{name}: its scores cannot be used, because they are of another {option.replace('_', ' ')}: "
                f"{_shown(given)}, not {_shown(expected)}; leave out --reuse"
            )


def _shown(value: str | None) -> str:
    return "none" if value is None else value or "''"
