"""Serves files and batches to the callers that may see them.

The methods wait for disks and the server, so call them in a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import Annotated, Any, BinaryIO, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from rankmill.extensions.batches.folder import FilesFolder
from rankmill.extensions.batches.lines import endpoints, first_request, holds_requests
from rankmill.extensions.batches.order import BatchOrder, with_fields
from rankmill.extensions.batches.records import (
    EVERYBODY,
    BatchRecord,
    BatchStore,
    FileRecord,
    R,
    errors_id,
    new_batch_id,
    new_file_id,
    output_id,
)
from rankmill.extensions.batches.settings import BatchSettings
from rankmill.extensions.batches.views import batch_view
from rankmill.extensions.gateway.dialects.routes import certain
from rankmill.extensions.gateway.keys.admission import check_model
from rankmill.extensions.gateway.keys.api_keys import ApiKey
from rankmill.extensions.gateway.refusals import Refusal, WrongFile, wrong
from rankmill.extensions.gateway.score_request import alone, within
from rankmill.extensions.gateway.scoring import ServedModel
from rankmill.extensions.gateway.settings import GatewaySettings
from rankmill.extensions.runners.record import new_file_run_id
from rankmill.extensions.runners.store import open_store
from rankmill.jobs.contract.errors import RunExpired
from rankmill.jobs.contract.file_request import FileOrder, FileRequest
from rankmill.jobs.model_names import ModelNames
from rankmill.jobs.runtime.connection import client_for
from rankmill.jobs.runtime.settings import Settings, run_spec
from rankmill.jobs.system import system

_ENDINGS = (".parquet", ".csv", ".tsv", ".jsonl", ".csv.gz", ".csv.zst", ".tsv.gz", ".tsv.zst")

_SWEEP_SECONDS = 3600.0

_OF_PAIRS = (
    "query_column", "passage_column", "text_column", "messages_column", "score_column", "rank_column",
    "query_id_column", "passage_id_column", "list_columns", "columns", "delimiter", "top_k", "limit",
    "output_format",
)  # fmt: skip

_fields: dict[str, Any] = {name: (FileRequest.model_fields[name].annotation, FileRequest.model_fields[name])
                           for name in _OF_PAIRS}  # fmt: skip
PairsOptions = create_model("PairsOptions", __config__=ConfigDict(extra="forbid"), **_fields)
"""The options of score-file that a batch may set if its file has rows to score, not requests."""


class ExpiresAfter(BaseModel):
    """The time for which a file is kept after it was made."""

    model_config = ConfigDict(extra="forbid")

    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=2_592_000)


class NewFile(BaseModel):
    """The fields of an upload besides the file and its purpose."""

    expires_after: ExpiresAfter | None = None


class NewBatch(BaseModel):
    """The body of a request that submits a batch. OpenAI's API lacks the fields ``model`` and ``pairs``,
    which are only for a file with rows.
    """

    model_config = ConfigDict(extra="ignore")

    input_file_id: str = Field(max_length=200)
    endpoint: str = Field("/v1/score", max_length=200)
    completion_window: Literal["24h"] = "24h"
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None = (
        Field(None, max_length=16)
    )
    output_expires_after: ExpiresAfter | None = None
    model: str | None = Field(None, min_length=1, max_length=1000)
    pairs: PairsOptions = Field(default_factory=PairsOptions)  # type: ignore[valid-type]


class Batches:
    """Keeps uploaded files, and submits, shows and cancels batches, on one Redis server.

    Parameters
    ----------
    settings
        The settings, such as the folder for files and their largest size.
    redis_url
        URL of the Redis server.

    Raises
    ------
    ConfigError
        The folder does not exist.
    """

    def __init__(self, settings: Settings, redis_url: str) -> None:
        self._settings = settings
        self._own = settings.of(BatchSettings)
        assert self._own.gateway_files
        self._folder = FilesFolder(self._own.gateway_files)
        client = client_for(redis_url, settings.redis_wait_seconds)
        self._runs = open_store(client, settings)
        self._store = BatchStore(client, self._runs.ttl)

    @property
    def most_bytes(self) -> int:
        return self._own.gateway_file_mib << 20

    @property
    def sweep_seconds(self) -> float:
        """Seconds between two calls of `sweep`, which renews the records of batches before they expire."""
        return min(_SWEEP_SECONDS, self._store.ttl / 2)

    def upload(
        self, key: ApiKey | None, name: str, source: BinaryIO, size: int, after: ExpiresAfter | None = None
    ) -> FileRecord:
        """Keep an uploaded file for ``file_run_ttl`` seconds, or for the shorter time `after`.

        Raises
        ------
        Refusal
            The file's name does not end in a known format, the caller's files would have too many bytes, or
            `after` is longer than ``file_run_ttl``.
        OutputError, StoreError
            The file cannot be written.
        """
        seconds = self._seconds("expires_after[seconds]", after)
        ending = next((suffix for suffix in _ENDINGS if name.lower().endswith(suffix)), None)
        if ending is None:
            raise wrong("file", f"its name must end in {', '.join(_ENDINGS)}, which says the format")
        owner, most = _owner(key), self._own.gateway_files_gib * 2**30
        if sum(file.bytes for file in self._store.all(FileRecord, owner)) + size > most:
            raise Refusal(
                "too_large", f"your files would have more than {most / 2**30:,.0f} GiB: delete some"
            )
        file_id, now = new_file_id(), system.now()
        shown = PurePosixPath(name.replace("\\", "/")).name[-200:]
        place = f"{file_id}/content{ending}"
        self._folder.save(source, place)
        file = FileRecord(
            id=file_id, owner=owner, name=shown, place=place, bytes=size, created=now,
            expires=now + seconds, purpose="batch",
        )  # fmt: skip
        self._folder.expire_early(file_id, self._store.ttl - seconds)
        self._store.add(file)
        return file

    def find(self, kind: type[R], key: ApiKey | None, record_id: str) -> R:
        """Find the record of a file or batch by its id. Raises `Refusal` if there is no record with this id,
        or if the caller may not see the record.
        """
        record = self._store.find(kind, record_id)
        if record is None or not (record.owner == _owner(key) or (key and key.admin)):
            why = f"there is no {kind.noun} {record_id!r:.100}: it has expired, or never was"
            raise Refusal("not_found", why)
        return record

    def all(self, kind: type[R], key: ApiKey | None) -> list[R]:
        return self._store.all(kind, EVERYBODY if key and key.admin else _owner(key))

    def content(self, file: FileRecord) -> Iterator[bytes]:
        try:
            return self._folder.read(file.place)
        except FileNotFoundError:
            raise _gone(file) from None

    def delete(self, key: ApiKey | None, file_id: str) -> None:
        """Delete a file and its record. Raises `Refusal` if the caller has no such file, or if a batch in
        progress reads it.
        """
        file = self.find(FileRecord, key, file_id)
        for batch in self._store.all(BatchRecord, file.owner):
            if batch.file == file_id and self._goes_on(batch):
                raise Refusal("conflict", f"batch {batch.id} reads the file: wait for its end, or cancel it")
        self._store.delete(file)
        self._folder.delete(file.place)

    def create(
        self, key: ApiKey | None, new_batch: NewBatch, served: Callable[[str | None], ServedModel]
    ) -> dict[str, Any]:
        """Submit a batch, and return its JSON.

        Parameters
        ----------
        key
            API key of the caller; ``None`` for a caller without a key.
        new_batch
            The batch to submit.
        served
            Finds a model by its name; ``None`` finds the default model.

        Raises
        ------
        Refusal, WrongFile
            The batch is not accepted.
        """
        if new_batch.endpoint not in endpoints():
            raise wrong("endpoint", f"must be one of {', '.join(endpoints())}")
        endpoint = certain(new_batch.endpoint, self._settings.of(GatewaySettings).gateway_dialect)
        file = self.find(FileRecord, key, new_batch.input_file_id)
        if not file.bytes:
            raise WrongFile("the file is empty: send one with rows")
        kept = self._seconds("output_expires_after.seconds", new_batch.output_expires_after)
        run_id = new_file_run_id()
        batch_id = new_batch_id(run_id)
        source = self._folder.at(file.place)
        if not source.is_file():
            raise _gone(file)
        if ".jsonl" in file.place and holds_requests(source):
            if new_batch.model or "pairs" in new_batch.model_fields_set:
                raise wrong("pairs", "model and pairs are for a file of rows, and this one has requests")
            first = first_request(source, endpoint).asked
            asked = dict(first.spec) if first else {}
            model, default = served(first.model if first else None), served(None)
            named = (first and first.model) or default.name
            order = BatchOrder(
                id=batch_id, owner=file.owner, endpoint=endpoint, model=named, default=default.name,
                asked=asked, kept=kept,
            )  # fmt: skip
            output = self._folder.at(f"{batch_id}/output.jsonl")
            request = FileRequest(inputs=(str(source),), output=str(output))
        else:
            model = served(new_batch.model)
            order = BatchOrder(id=batch_id, owner=file.owner, kept=kept)
            request = self._pairs(new_batch.pairs, batch_id, file.place)
            kind = request.kind_of_rows
            asked = {} if kind == "pairs" else dict(alone((), None, {"inputs": kind}).spec)
        check_model(key, model)
        spec = within(self._settings, model.model, asked)
        pinned = ModelNames(self._settings).pinned(run_spec(self._settings, spec))
        batch = BatchRecord(
            id=batch_id, owner=file.owner, run=run_id, file=file.id, endpoint=new_batch.endpoint,
            model=model.name, created=system.now(), metadata=new_batch.metadata or {},
        )  # fmt: skip
        self._folder.make(batch_id)
        self._store.add(batch)
        settings = self._settings
        own = {"queue": settings.queue, "chunk_size": settings.chunk_size, **order.of_order()}
        own |= {"tenant": (key.name if key else settings.tenant) or None, "weight": (key or settings).weight}
        self._runs.submit(FileOrder(request=request, spec=pinned, **own), run_id)
        return self.view(batch)

    def cancel(self, key: ApiKey | None, batch_id: str) -> dict[str, Any]:
        batch = self.find(BatchRecord, key, batch_id)
        try:
            run = self._runs.load(batch.run)
            if not run.is_ended:
                self._runs.cancel(run)
        except RunExpired:
            pass
        return self.view(batch)

    def view(self, batch: BatchRecord) -> dict[str, Any]:
        # Ask this before the record is read: a runner that ends the run deletes the cancellation.
        was_cancelled = self._runs.was_cancelled(batch.run)
        try:
            run = self._runs.load(batch.run)
        except RunExpired:
            return batch_view(batch, None, self._store.counts(batch.id))
        files = (output_id(batch.id), errors_id(batch.id)) if run.state == "done" else ()
        kept = [file_id if self._store.find(FileRecord, file_id) else None for file_id in files]
        counts = self._store.counts(batch.id)
        return batch_view(batch, run, counts, kept or (None, None), cancelling=was_cancelled)

    def sweep(self) -> None:
        """Delete the bytes of expired files and batches. Batches in progress and their input files are kept,
        and the records of these batches are renewed.
        """

        def is_known(name: str) -> bool:
            return name in read or bool(
                self._store.find(FileRecord, name) or self._store.find(BatchRecord, name)
            )

        going_on = list(filter(self._goes_on, self._store.all(BatchRecord, EVERYBODY)))
        for batch in going_on:
            self._store.renew(batch)
        read = {batch.file for batch in going_on}
        self._folder.sweep(is_known, self._store.ttl)

    def _goes_on(self, batch: BatchRecord) -> bool:
        try:
            return not self._runs.load(batch.run).is_ended
        except RunExpired:
            return False

    def _seconds(self, field: str, after: ExpiresAfter | None) -> int:
        most = self._store.ttl
        if after and after.seconds > most:
            raise wrong(field, f"files are kept for at most {most:,} s here, not for {after.seconds:,}")
        return after.seconds if after else most

    def _pairs(self, options: BaseModel, batch_id: str, place: str) -> FileRequest:
        """Make the `FileRequest` that scores a batch's file of rows. Without an ``output_format`` in the
        options, the output has the format of the input. Raises `Refusal` if the options do not fit together.
        """
        given = options.model_dump()
        ending = place.removesuffix(".gz").removesuffix(".zst").rpartition(".")[2]
        output = f"{batch_id}/output.{given['output_format'] or ending}"
        try:
            return FileRequest(
                inputs=(str(self._folder.at(place)),), output=str(self._folder.at(output)), **given
            )
        except ValidationError as error:
            why = with_fields(error.errors()[0]["msg"].removeprefix("Value error, "))
            raise Refusal("invalid", why, param="pairs") from None


def _gone(file: FileRecord) -> Refusal:
    return Refusal("not_found", f"the bytes of file {file.id!r:.100} are gone")


def _owner(key: ApiKey | None) -> str:
    return key.name if key else ""
