"""Reads the scores of an earlier output of the same model (``--reuse``)."""

from __future__ import annotations

from pydantic import ValidationError

from rankmill.jobs.cache import cache_folder
from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.contract.file_request import FileRequest
from rankmill.jobs.contract.spec import OPEN_PRECISIONS
from rankmill.jobs.runtime.settings import Settings
from rankmill.producer.collect.earlier import EarlierScores, check_same, read_earlier
from rankmill.producer.files.formats.parquet import metadata_of, scored_rows
from rankmill.producer.files.manifest import content_here
from rankmill.producer.files.stores.paths import as_path
from rankmill.score.input import text_columns
from rankmill.score.output import named_columns
from rankmill.score.summary import Tally, metadata


def earlier_scores(request: FileRequest, settings: Settings) -> tuple[Settings, EarlierScores | None]:
    """Read the earlier output that the request names; the run takes its revision and precision from it.

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
        found = metadata_of(path)
    except InputError as error:
        raise InputError(f"{path}: --reuse needs Parquet: {str(error).removeprefix(f'{path}: ')}") from None
    wanted = metadata(settings, Tally()) | named_columns(request)
    if content := content_here(settings.model, cache_folder(settings.cache_dir)):
        wanted["rankmill.revision"] = content
    if settings.precision in OPEN_PRECISIONS:
        wanted["rankmill.precision"] = ""
    check_same(found, wanted, str(path))
    taken = {"precision": found.get("rankmill.precision"), "revision": found.get("rankmill.revision") or None}
    try:
        settings = Settings.model_validate({**settings.model_dump(), **taken})
    except ValidationError:
        raise InputError(f"{path}: its scores cannot be used, they are in {taken['precision']}") from None
    texts, score = text_columns(request).sent, request.score_column
    scored = scored_rows(path, (*texts, score), "--reuse")
    return settings, read_earlier(scored.batches, texts, score, found.get("rankmill.kind"))
