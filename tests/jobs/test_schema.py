"""What crosses Redis as text: it comes back as it was, and nothing else is let in."""

from __future__ import annotations

import json
from typing import Any, get_type_hints

import fakeredis
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rq.job import Job

from rankmill.jobs.contract import keys
from rankmill.jobs.contract.errors import FormatError, WireError
from rankmill.jobs.contract.job import chunk_of
from rankmill.jobs.contract.keys import ChunkId, PieceId, parent_of
from rankmill.jobs.contract.results import (
    BadResult,
    ChunkFailure,
    ChunkScores,
    ChunkStats,
    from_entry,
    read_entry,
    to_entry,
)
from rankmill.jobs.contract.run import Progress, RowError, Run, read_run
from rankmill.jobs.contract.schema import WireModel
from rankmill.jobs.contract.spec import ScoreSpec, SpecOptions
from rankmill.jobs.protocol.worker_report import WorkerReport

STATS = ChunkStats(
    worker="w", device="cpu", device_name="cpu", backend="torch", precision="fp32", revision=None,
    attempt=1, tokens=10, padded_tokens=12, batches=1, seconds=0.5,
)  # fmt: skip
RUN = Run(id="0af", spec=ScoreSpec(model="m"), queue="q", ttl=100, max_retries=2, created=1.5)
FAILURE = ChunkFailure(chunk=7, message="broken: ä", fatal=True, attempts=3, worker="w", died=True)
JSON_MODELS: list[WireModel] = [
    STATS,
    Progress(rows=3, at=1.5),
    RowError(row=3, error="passage is null", attempts=1, worker=""),
    WorkerReport(device="cpu", started=1.0, beat=2.0, models=("m",)),
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def as_stored(fields: dict[str, Any]) -> dict[bytes, bytes]:
    """As Redis gives back what was written."""
    return {
        name.encode(): value if isinstance(value, bytes) else str(value).encode()
        for name, value in fields.items()
    }


@pytest.mark.parametrize("model", JSON_MODELS, ids=lambda model: type(model).__name__)
def test_json_comes_back_and_no_field_may_be_unknown_or_missing(model: WireModel) -> None:
    kind, found = type(model), json.loads(model.model_dump_json())
    assert kind.read_json(json.dumps(found), "it") == model
    assert kind.read_json(model.written(), "it") == model
    with pytest.raises(WireError, match="it is damaged: new: Extra inputs"):
        kind.read_json(json.dumps({**found, "new": 1}), "it")
    with pytest.raises(WireError, match="it has format 3, this release reads 1: run the same rankmill"):
        kind.read_json(json.dumps({**found, "new": 1, "format": 3}), "it")
    for name in found:
        with pytest.raises(WireError, match=f"it is damaged: it has no {name}"):
            kind.read_json(json.dumps({key: found[key] for key in found if key != name}), "it")


@pytest.mark.parametrize("model", JSON_MODELS, ids=lambda model: type(model).__name__)
@given(data=st.data())
def test_damaged_json_is_refused_or_still_of_the_right_types(model: WireModel, data: st.DataObject) -> None:
    kind, found = type(model), json.loads(model.model_dump_json())
    field = data.draw(st.sampled_from(sorted(found)))
    raw = json.dumps({**found, field: data.draw(JSON)})
    try:
        read = kind.read_json(raw, "it")
    except WireError:
        return
    assert kind.read_json(read.model_dump_json(), "it") == read
    json.loads(read.model_dump_json(), parse_constant=pytest.fail)  # a text may be "NaN", a number may not


@given(st.binary(max_size=100) | st.just(b"[" * 100_000) | st.just(b'{"rows": 1' + b"0" * 5000 + b"}"))
def test_noise_is_no_json(noise: bytes) -> None:
    with pytest.raises(WireError):
        Progress.read_json(noise, "it")


def test_a_run_comes_back_from_its_hash() -> None:
    for run in (RUN, RUN.model_copy(update={"rows": 12})):
        stored = as_stored(run.fields())
        assert read_run("0af", stored) == run
        for name in stored:
            with pytest.raises(WireError, match="run 0af"):
                read_run("0af", {key: value for key, value in stored.items() if key != name})
            with pytest.raises(WireError, match="run 0af is damaged: it is not UTF-8"):
                read_run("0af", {**stored, name: b"\xff"})
        with pytest.raises(WireError, match="run 0af is damaged: new: Extra"):
            read_run("0af", {**stored, b"new": b"1"})
        spec = json.loads(stored[b"spec"])
        for name in spec:
            some = {key: value for key, value in spec.items() if key != name}
            with pytest.raises(WireError, match=f"run 0af is damaged: spec: .*it has no {name}"):
                read_run("0af", {**stored, b"spec": json.dumps(some).encode()})
        with pytest.raises(WireError, match="run 0af is damaged: created"):
            read_run("0af", {**stored, b"created": b"nan"})


def test_a_failure_comes_back_from_its_entry() -> None:
    entry = as_stored(to_entry("0af", FAILURE))
    assert from_entry("0af", entry) == FAILURE
    for name in entry:
        for damaged in ({**entry, name: b"\xff"}, {key: entry[key] for key in entry if key != name}):
            with pytest.raises(WireError):
                from_entry("0af", damaged)
    with pytest.raises(WireError, match="the result of chunk 7 is damaged: new"):
        from_entry("0af", {**entry, b"new": b"1"})


def test_a_result_of_another_run_is_none_of_this_one() -> None:
    entry = as_stored(to_entry("0af", FAILURE))
    with pytest.raises(WireError, match="the results of run 0ae have one of run 0af"):
        from_entry("0ae", entry)
    assert read_entry("0ae", entry) == BadResult(None, "the results of run 0ae have one of run 0af")


@given(st.integers(0, 10**12), st.integers(0, 10**6), st.integers(1, 10**6))
def test_a_piece_is_named_by_its_chunk_and_its_rows(first: int, start: int, rows: int) -> None:
    pieces: list[ChunkId] = [PieceId(first, start, rows), PieceId(first, start, rows + 1), first]
    assert len({keys.job_id("0af", each) for each in pieces}) == 3
    for piece in pieces:
        assert keys.parse_job_id(keys.job_id("0af", piece)) == ("0af", piece)
        assert parent_of(piece) == first
        failure = FAILURE.model_copy(update={"chunk": piece})
        assert from_entry("0af", as_stored(to_entry("0af", failure))) == failure


@pytest.mark.parametrize(
    "arguments", [(), ("run",), (1, "run"), ("run", -1), ("run", 1), ("run", "1.5"), ("run", "1_2")]
)
def test_a_job_has_a_run_and_a_chunk_for_arguments(arguments: tuple[Any, ...]) -> None:
    def job(*args: Any) -> Job:
        return Job.create("rankmill.score_chunk", args=args, connection=fakeredis.FakeRedis())

    for chunk in (7, PieceId(7, 0, 5)):
        assert chunk_of(job("run", str(chunk))) == ("run", chunk)
    with pytest.raises(WireError, match="the arguments must be a run's id and a chunk's name"):
        chunk_of(job(*arguments))


def test_a_run_of_another_format_is_refused_in_a_line_that_names_both() -> None:
    stored = as_stored(RUN.fields())
    with pytest.raises(
        FormatError, match="run 0af has format 4, this release reads 1: run the same rankmill"
    ):
        read_run("0af", {**stored, b"format": b"4"})


@pytest.mark.parametrize(("field", "value"), [("weight", 0.0), ("weight", -1.0), ("ttl", -1)])
def test_a_run_with_a_wrong_value_is_refused(field: str, value: object) -> None:
    with pytest.raises(WireError, match=field):
        read_run("0af", {**as_stored(RUN.fields()), field.encode(): str(value).encode()})


def test_lists_of_scores_need_their_labels() -> None:
    scores = pa.FixedSizeListArray.from_arrays(pa.array([1.0, 2.0], pa.float32()), 2)
    named = STATS.model_copy(update={"labels": ("no", "yes")})
    entry = as_stored(to_entry("0af", ChunkScores(0, scores, pa.nulls(1, pa.string()), named)))
    found = from_entry("0af", entry)
    assert isinstance(found, ChunkScores)
    assert found.stats == named
    for labels in ((), ("one",)):
        other = named.model_copy(update={"labels": labels}).written()
        with pytest.raises(WireError, match="its scores are not those of its"):
            from_entry("0af", {**entry, b"stats": other.encode()})


def test_a_client_s_options_are_the_fields_of_a_spec() -> None:
    fields = {name: field.annotation for name, field in ScoreSpec.model_fields.items()}
    assert get_type_hints(SpecOptions) == fields
