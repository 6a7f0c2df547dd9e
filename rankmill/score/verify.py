"""Scores some rows of a scored file again, and compares the scores (``score-file --verify``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import BaseModel, ValidationError

from rankmill.jobs.cache import cache_folder
from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.contract.results import worst
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.runtime.settings import Settings
from rankmill.jobs.system import system
from rankmill.producer.client.runs import as_array
from rankmill.producer.collect.pairs import USUAL_COLUMNS
from rankmill.producer.files.formats.parquet import scored_rows
from rankmill.producer.files.manifest import content_here
from rankmill.producer.files.outputs import bound_of, option_of
from rankmill.producer.files.stores.paths import AnyPath
from rankmill.producer.local.embedded import EmbeddedCluster
from rankmill.score.reuse import made_earlier, shown_value
from rankmill.score.session import Session


class Verification(BaseModel):
    """The result of scoring some rows of a file again.

    Attributes
    ----------
    rows, sampled
        Numbers of rows in the file, and of rows that were scored again.
    differ
        Number of rows that were scored again and whose score in the file is wrong.
    first
        Number (from 0) of the first row with a wrong score.
    largest
        Largest difference between an old and a new score.
    allowed
        A score is wrong if it differs by more than this.
    deterministic
        Whether the file is deterministic. A score is then wrong if its bits differ.
    """

    file: str
    rows: int
    sampled: int
    differ: int
    first: int | None
    largest: float
    allowed: float
    deterministic: bool

    def __str__(self) -> str:
        of_all = f"{self.file}: {self.sampled:,} of {self.rows:,} rows were scored again"
        bits = (
            "the same bits" if self.deterministic else f"the same score to {self.allowed:.2g}, as was proven"
        )
        if not self.differ:
            return f"{of_all}, and all have {bits} (largest difference: {self.largest:.2g})"
        return (
            f"{of_all}, and {self.differ:,} do not have {bits}: they differ by up to {self.largest:.2g}, "
            f"the first is row {self.first}"
        )


@dataclass(frozen=True)
class ScoredBefore:
    """A scored file to verify.

    Attributes
    ----------
    metadata
        The file's metadata, which say how it was scored.
    settings
        Settings that score its rows in the same way again.
    """

    path: AnyPath
    metadata: Mapping[str, str]
    settings: Settings

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns with the texts that were scored, and of the column with the score."""
        names = (*USUAL_COLUMNS[self.settings.inputs], "score")
        return tuple(self.metadata.get(f"rankmill.{name}_column", name) for name in names)

    @property
    def kind(self) -> str | None:
        return self.metadata.get("rankmill.kind")

    @property
    def bound(self) -> float | None:
        """The largest distance of the file's logits from the model's own logits, as was proven when the file
        was made. ``None`` if the file does not say it.
        """
        return bound_of(self.metadata)


def read_scored(name: str, settings: Settings, given: Mapping[str, Any]) -> ScoredBefore:
    """Read from a file's metadata how the file was scored.

    Parameters
    ----------
    name
        Path of the file.
    settings
        Settings that say where to score. The file's metadata replace the settings that say how to score.
    given
        Options of the command, under their names in `settings`. An option that is not ``None`` must have the
        value with which the file was scored.

    Raises
    ------
    InputError
        The file is not a Parquet output of score-file with one score in each row, or it was scored with
        another value of an option in `given`. Or the files of its model have changed, or its metadata do not
        say how exact its scores are.
    """
    path, metadata = made_earlier(name, "--verify")
    if "rankmill.columns" in metadata or metadata.get("rankmill.all_labels") == "True":
        raise InputError(f"{path}: its rows have several scores, and --verify compares one")
    spec, wanted = _spec(path, metadata), settings.spec()
    for option in ScoreSpec.model_fields:
        made = getattr(spec, option)
        if given.get(option) is not None and made != getattr(wanted, option):
            raise InputError(
                f"{path}: it was scored with {option} {shown_value(made)}, not {given[option]}: leave out "
                f"--{option.replace('_', '-')}, or verify another file"
            )
    content = content_here(spec.model, cache_folder(settings.cache_dir))
    if content and spec.revision and content != spec.revision:
        raise InputError(
            f"{path}: it was scored with other files of model {spec.model}: their content was "
            f"{spec.revision:.12}, and is {content:.12} now"
        )
    before = ScoredBefore(path, metadata, settings.model_copy(update=spec.model_dump()))
    if before.bound is None and before.kind is None:
        raise InputError(
            f"{path}: no bound of its scores was proven, so a difference would mean nothing: score it again "
            "with --deterministic"
        )
    return before


def _spec(path: AnyPath, metadata: Mapping[str, str]) -> ScoreSpec:
    written = {name: option_of(metadata, name) for name in ScoreSpec.model_fields}
    named = {name: value for name, value in written.items() if value is not None}
    named["precision"] = (named.get("precision") or "auto").partition(" ")[0]
    try:
        return ScoreSpec.model_validate(named)
    except ValidationError as error:
        where = error.errors()[0]["loc"][0]
        raise InputError(
            f"{path}: its metadata rankmill.{where} is {named.get(str(where))!r:.80}, which this release "
            "cannot read"
        ) from None


def verify(scored: ScoredBefore, sample: int, cluster: EmbeddedCluster | None = None) -> Verification:
    """Score up to `sample` rows of a file again, chosen at random, and compare the scores.

    Raises
    ------
    InputError
        The file is damaged or lacks a column. Or the file is deterministic, and the present workers would
        compute other bits.
    RunFailed
        The workers cannot score with the file's model.
    """
    *texts, score = scored.columns
    places, table, rows = _sampled(scored, sample)
    before = as_array(table[score].combine_chunks().cast(pa.float32()))
    with Session(scored.settings, cluster) as session:
        again = session.score(table.select(texts), tuple(texts))
    kinds = {chunk.kind for chunk in again.stats}
    if scored.kind and kinds - {scored.kind}:
        raise InputError(
            f"{scored.path}: its scores have the bits of {scored.kind}, and the workers here have those of "
            f"{', '.join(map(str, kinds))}: verify it on workers of that kind"
        )
    with np.errstate(invalid="ignore"):
        apart = np.abs(again.scores.astype(np.float64) - before)
    if scored.kind:
        allowed, wrong = 0.0, _bits(again.scores) != _bits(before)
    else:
        own = scored.bound or 0.0
        allowed = own + max(own, worst([chunk.bound for chunk in again.stats]) or 0.0)
        wrong = ~(apart <= allowed)  # not `>`, so that a row without a score now (NaN) is wrong
    return Verification(
        file=str(scored.path),
        rows=rows,
        sampled=len(places),
        differ=int(wrong.sum()),
        first=int(places[wrong][0]) if wrong.any() else None,
        largest=float(np.nanmax(apart, initial=0.0)),
        allowed=allowed,
        deterministic=scored.kind is not None,
    )


def _bits(scores: npt.NDArray[np.float32]) -> npt.NDArray[np.uint32]:
    return np.ascontiguousarray(scores, np.float32).view(np.uint32)


def _sampled(before: ScoredBefore, sample: int) -> tuple[npt.NDArray[np.int64], pa.Table, int]:
    """Choose up to `sample` rows of a scored file at random, and leave out those without a score. Returns the
    rows' numbers, a table of their texts and scores, and the number of all rows of the file.
    """
    *_, score = before.columns
    scored = scored_rows(before.path, before.columns, "--verify")
    chance = np.random.default_rng(int(system.unique_id(), 16))
    chosen = np.sort(chance.choice(scored.rows, min(sample, scored.rows), replace=False))
    parts, places, first = [scored.schema.empty_table()], [chosen[:0]], 0
    for batch in scored.batches:
        mine = chosen[(chosen >= first) & (chosen < first + len(batch))]
        has_score = batch[score].is_valid().to_numpy(zero_copy_only=False)[mine - first]
        places.append(mine[has_score])
        rows = batch.take(pa.array(mine[has_score] - first))
        parts.append(pa.Table.from_batches([rows]).select(scored.schema.names))
        first += len(batch)
    return np.concatenate(places), pa.concat_tables(parts), scored.rows
