"""Estimates what scoring a file would take, from a sample of its pairs."""

from __future__ import annotations

from contextlib import ExitStack, closing
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.contract.file_request import FileRequest
from rankmill.jobs.protocol.worker_report import worker_reports
from rankmill.jobs.runtime.settings import Settings
from rankmill.producer.collect.sizing import Sizing
from rankmill.producer.files.source import PairSource
from rankmill.producer.local.embedded import EmbeddedCluster
from rankmill.score.input import find_input
from rankmill.score.output import find_target
from rankmill.score.score_file import with_inputs
from rankmill.score.session import Session

_LOOK_ROWS, _AT_ONCE = 100_000, 1000
"""`estimate` draws its sample from the first `_LOOK_ROWS` rows of the input. It reads these rows in tables of
at most `_AT_ONCE` rows.
"""


class Estimate(BaseModel):
    """What scoring all rows of an input would take, estimated from a sample of its pairs.

    Attributes
    ----------
    rows, sampled
        Numbers of rows in the input and in the sample.
    workers
        Number of workers that scored the sample.
    seconds
        Time to score all rows with the same workers.
    tokens
        Number of real tokens, without padding, in all rows.
    truncated_share
        Share of sampled pairs with more tokens than the model's limit. ``None`` if the settings do not
        truncate long pairs.
    error_share
        Share of sampled pairs without a score.
    worker_bytes
        Memory of the largest worker process.
    int8_gain
        Speed of int8 divided by that of the precision used; ``None`` if no worker has measured it.
    """

    model_config = ConfigDict(frozen=True)

    rows: int
    sampled: int
    workers: int
    pairs_per_second: float
    seconds: float
    tokens: int
    truncated_share: float | None
    error_share: float
    worker_bytes: int
    model: str
    backend: str
    device: str
    precision: str
    int8_gain: float | None


def estimate(
    request: FileRequest, settings: Settings, sample: int, cluster: EmbeddedCluster | None
) -> Estimate:
    """Estimate what scoring the files of `request` would take, by scoring at most `sample` of their pairs
    twice.

    The first scoring loads the model, and shows which pairs have more tokens than the model's limit. The
    second scoring is timed.

    Raises
    ------
    InputError
        The input cannot be read or has no rows, or the output could not be written. Or the request reads
        standard input, names several models, or asks for several scores in each row.
    RunFailed
        The workers cannot score with the model.
    """
    if request.reads_stdin or request.models or settings.all_labels or len(request.messages_column) > 1:
        raise InputError(
            "--estimate needs files, one model and one score in each row: save standard input to a file, or "
            "name one model and one label"
        )
    settings = with_inputs(request, settings)
    input_files = find_input(request)
    find_target(request, input_files.files).check(input_files.files, settings)
    with ExitStack() as stack:
        input_files.identify(Path(), stack)
        source = input_files.open()
        table = _sampled(source, sample)
        session = stack.enter_context(Session(settings, cluster))
        truncates = settings.long == "truncate"
        first = session.score(table, source.columns.sent, long="refuse" if truncates else settings.long)
        timed = session.score(table, source.columns.sent)
        reports = worker_reports(session.client.store.redis, timed.workers)
    lost, over = (int(np.isnan(scored.scores).sum()) for scored in (timed, first))
    speed, stats = len(table) / timed.seconds, timed.stats
    gains = [chunk.int8_gain for chunk in stats if chunk.int8_gain is not None]
    return Estimate(
        rows=source.rows,
        sampled=len(table),
        workers=len(timed.workers),
        pairs_per_second=round(speed, 1),
        seconds=round(source.rows / speed, 3),
        tokens=round(sum(chunk.tokens for chunk in stats) / len(table) * source.rows),
        truncated_share=(over - lost) / len(table) if truncates else None,
        error_share=lost / len(table),
        worker_bytes=max((report.resident_bytes for report in reports.values()), default=0),
        model=settings.model,
        backend=", ".join(sorted({chunk.backend for chunk in stats})),
        device=", ".join(sorted({chunk.device for chunk in stats})),
        precision=", ".join(sorted({chunk.precision for chunk in stats})),
        int8_gain=round(min(gains), 2) if gains else None,
    )


def _sampled(source: PairSource, sample: int) -> pa.Table:
    """Return up to `sample` pairs of the input's first `_LOOK_ROWS` rows, at random with a fixed seed."""
    names = list(source.columns.sent)
    with closing(source.tables(Sizing(_AT_ONCE), names=())) as tables:
        parts = [table.select(names) for table in islice(tables, _LOOK_ROWS // _AT_ONCE)]
    if not parts:
        raise InputError("the input has no rows to estimate from")
    table = pa.concat_tables(parts)
    chosen = np.random.default_rng(0).choice(len(table), min(sample, len(table)), replace=False)
    return table.take(np.sort(chosen))
