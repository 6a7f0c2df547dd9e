"""Rows of JSON: what is sent is what they hold, what passes through stays, and a type fits all values."""

from __future__ import annotations

import datetime as dt
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankmill.jobs.contract.errors import InputError
from rankmill.producer.collect.scored import ScoredTable
from rankmill.producer.collect.sizing import Sizing
from rankmill.producer.files.formats import jsonl
from rankmill.producer.files.formats.base import ReadOptions, TextColumns
from rankmill.producer.files.inputs import find_files
from rankmill.producer.files.outputs import OutputFormat
from rankmill.producer.files.plan import plan_output
from rankmill.producer.files.sink import ScoredFile
from rankmill.producer.files.source import FileSource, open_source

PAIRS = TextColumns("query", "passage")
CONVERSATIONS = TextColumns("messages", inputs="conversations")
PAIR = '"query": "q", "passage": "p"'


def opened(
    *paths: Path, columns: TextColumns = PAIRS, as_text: tuple[str, ...] = (), **options: Any
) -> FileSource:
    return open_source(
        find_files([str(path) for path in paths]),
        columns,
        allow_nulls=True,
        as_text=as_text,
        options=ReadOptions(**options),
    )


def scored(target: Path, source: FileSource, **form: Any) -> Path:
    """The rows of `source` with the scores 0.5, 1.5, 2.5 and so on, as score-file writes them."""
    plan = plan_output(source, target, OutputFormat(**form), ["score"])
    with ScoredFile(target, target.parent, plan) as output:
        row = 0
        with closing(source.tables(Sizing(2), 0, plan.needed)) as tables:
            for table in tables:
                scores = pa.array([row + n + 0.5 for n in range(len(table))], pa.float32())
                output.write(ScoredTable(table, scores, pa.nulls(len(table), pa.string()), None, 1, "w"))
                row += len(table)
        output.finish({})
        output.publish()
    return target


def sent(source: FileSource) -> list[Any]:
    """The conversations that workers get."""
    (name,) = source.columns.sent
    with closing(source.tables(Sizing(2), 0, ())) as tables:
        return [text and json.loads(text) for table in tables for text in table[name].to_pylist()]


def same(found: Any, expected: Any) -> bool:
    """Whether two values have the same JSON: other than for ==, 3 is not 3.0, and keys have an order."""
    return json.dumps(found) == json.dumps(expected)


CALLS: list[Any] = [
    {"n": 3}, {"n": 3.5}, {"n": None}, {}, {"b": 1, "a": 2}, {"a": 1, "b": 2}, {"n": 2**70},
    {"n": [1, "x", [2.0]]}, {"n": True}, "text", {"at": "2024-01-01"}, {"n": {"deep": {}}}, {"n": 1e22}, None,
]  # fmt: skip


def exchange(call: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "why"}, {"role": "assistant", "content": None, "calls": [call]}]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
@pytest.mark.parametrize("typed", [True, False])
@pytest.mark.parametrize("block", [1 << 20, 64])
def test_a_conversation_is_sent_as_it_is_whatever_others_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, typed: bool, block: int
) -> None:
    monkeypatch.setattr(jsonl, "_BLOCK_BYTES", block)
    rows = [{"messages": exchange(call), "id": n} for n, call in enumerate(CALLS)]
    rows += [{"messages": None}, {"messages": json.dumps(exchange("as text"))}, {"id": 1}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / name).write_text(lines if name == "a.jsonl" else json.dumps(rows, indent=1))
    found = sent(opened(tmp_path / name, columns=CONVERSATIONS, typed=typed))
    assert same(found, [*map(exchange, CALLS), None, exchange("as text"), None])


def test_what_is_no_conversation_is_named_before_any_work(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"messages": []}\n\n{"messages": 5}\n')
    for typed in (True, False):
        with pytest.raises(
            InputError, match=r"a\.jsonl, line 3: column 'messages' holds '5', not a conversation"
        ):
            opened(path, columns=CONVERSATIONS, typed=typed)


LINES = [
    f'{{{PAIR}, "id": 1, "x": 1.10, "big": 123456789012345678901234567890}}',
    f'{{"z": null, {PAIR}, "id": "a2", "x": 1e400, "n": NaN}}',
    f'{{ {PAIR} ,"deep":{{"b":[1,2.0,"x",null],"a":{{}}}},"e":"\\u00e9\\ud800 \\/ é","x":-0.0 }}  ',
    '{"passage": "p", "query": null, "2024": "2024-01-01T00:00:00Z", "x": true, "x": [1]}',
    "{}",
]
"""Rows that agree on little, and whose values can be written in other ways."""


@pytest.mark.parametrize("block", [1 << 20, 64])
@pytest.mark.parametrize("end", ["", ".gz", ".zst"])
def test_rows_of_json_lines_are_carried_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, end: str
) -> None:
    monkeypatch.setattr(jsonl, "_BLOCK_BYTES", block)
    path = tmp_path / "a.jsonl"
    path.write_text("\n\n".join(LINES) + "\r\n", newline="")
    output = scored(tmp_path / f"o.jsonl{end}", opened(path, typed=False))
    with pa.input_stream(output, compression="detect") as stream:
        found = stream.read().decode().splitlines()
    added = [f'"score": {n}.5}}' for n in range(len(LINES))]
    kept = [line.strip().removesuffix("}").rstrip() for line in LINES]
    assert found == [
        f"{line}{'' if line == '{' else ', '}{score}" for line, score in zip(kept, added, strict=True)
    ]


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=60)
@given(
    st.lists(st.dictionaries(st.text(max_size=3), _values, max_size=4), min_size=1, max_size=6), st.booleans()
)
def test_whatever_a_row_holds_comes_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], is_array: bool
) -> None:
    rows = [{**row, "query": "q", "passage": "p"} for row in rows]
    folder = tmp_path_factory.mktemp("rows")
    path = folder / ("a.json" if is_array else "a.jsonl")
    path.write_text(
        json.dumps(rows, indent=1) if is_array else "".join(json.dumps(row) + "\n" for row in rows)
    )
    output = scored(folder / "o.jsonl", opened(path, typed=False))
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert same(found, [{**row, "score": n + 0.5} for n, row in enumerate(rows)])


def test_items_of_an_array_keep_their_notation(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(f'[\n {{\n  {PAIR},\n  "x": 1.10,\n  "n": [1,\n 2]}}\n]')
    output = scored(tmp_path / "o.jsonl", opened(tmp_path / "a.json", typed=False))
    assert output.read_text() == f'{{   {PAIR},   "x": 1.10,   "n": [1,  2], "score": 0.5}}\n'


def test_ranked_rows_only_get_their_rank(tmp_path: Path) -> None:
    lines = [f'{{"qid": {q}, {PAIR}, "x": {x}}}' for q, x in (("1", "1.0"), ('"1"', "null"), ("2", "1e5"))]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    output = scored(tmp_path / "o.jsonl", opened(tmp_path / "a.jsonl", typed=False), top_k=2)
    assert output.read_text().splitlines() == [
        f'{lines[1][:-1]}, "score": 1.5, "rank": 1}}',
        f'{lines[0][:-1]}, "score": 0.5, "rank": 2}}',
        f'{lines[2][:-1]}, "score": 2.5, "rank": 1}}',
    ]


def test_only_what_is_asked_for_changes_in_a_row(tmp_path: Path) -> None:
    """Lists are unrolled, columns become text, and folders become columns; the rest stays, and its order."""
    folder = tmp_path / "day=7" / "who=me"
    folder.mkdir(parents=True)
    row = {"id": 7, "passage": ["a", None], "ids": [1, "x"], "query": "q", "x": None, "code": [1]}
    (folder / "a.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({**row, "passage": [], "ids": []}))
    source = opened(tmp_path, as_text=("id", "code"), lists=("passage", "ids"), typed=False)
    found = [json.loads(line) for line in scored(tmp_path / "o.jsonl", source).read_text().splitlines()]
    assert same(found, [
        {"id": "7", "passage": text, "ids": key, "query": "q", "x": None, "code": "[1]", "day": 7,
         "who": "me", "score": score}
        for text, key, score in (("a", 1, 0.5), (None, "x", 1.5))
    ])  # fmt: skip


@pytest.mark.parametrize("changed", [{"as_text": ("code",)}, {"lists": ("passage",)}])
def test_what_no_text_or_number_holds_stays_in_a_changed_row(tmp_path: Path, changed: dict[str, Any]) -> None:
    """Half of an emoji and NaN, in rows of which another column becomes text, or whose lists are unrolled."""
    passage = '["p"]' if "lists" in changed else '"p"'
    path = tmp_path / "a.jsonl"
    path.write_text(
        f'{{"query": "q", "passage": {passage}, "code": 1, "half": "\\ud83d", "far": [NaN, 1e999]}}\n'
    )
    source = opened(path, typed=False, **changed)
    (line,) = scored(tmp_path / "o.jsonl", source).read_text().splitlines()
    assert '"half": "\\ud83d", "far": [NaN, Infinity]' in line


def test_a_column_that_only_a_late_row_has_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f"{{{PAIR}}}\n" * 3 + f'{{{PAIR}, "score": 1}}\n')
    with pytest.raises(InputError, match="a column 'score' already; name the new one with --score-column"):
        scored(tmp_path / "o.jsonl", opened(path, typed=False))
    source = opened(path, typed=False)
    plan = plan_output(source, tmp_path / "o.jsonl", OutputFormat(), ["new"])  # the way out
    assert plan.scores == ["new"]


@pytest.mark.parametrize("key", ["\0", "\0query"])
def test_a_column_whose_name_the_files_reader_uses_is_refused(tmp_path: Path, key: str) -> None:
    """Its values would be whole rows, or those of the column ``query``."""
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"query": "q", "passage": "p", key: "x"}))
    with pytest.raises(InputError, match=r"column '\\x00\w*' begins with a NUL character; rename it"):
        scored(tmp_path / "o.parquet", opened(path))
    table = pa.table({"query": ["q"], "passage": ["p"], key: ["x"]})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(InputError, match="begins with a NUL character"):
        scored(tmp_path / "o.jsonl", opened(tmp_path / "a.parquet"))


MIXED: dict[str, tuple[list[Any], list[Any]]] = {
    "numbers and text": ([1, "a2", None, 2.5], ["1", "a2", None, "2.5"]),
    "late": ([1] * 9 + ["x"], ["1"] * 9 + ["x"]),
    "truth and numbers": ([True, 1], ["true", "1"]),
    "truth and fractions": ([0.5, True, None], ["0.5", "true", None]),
    "truth and fractions inside": ([{"n": [0.5]}, {"n": [True]}], ['{"n": [0.5]}', '{"n": [true]}']),
    "truth and fractions in a list": ([[0.5, True]], ["[0.5, true]"]),
    "objects and lists": ([{"a": 1}, [2]], ['{"a": 1}', "[2]"]),
    "nothing inside": ([{}, {}], ["{}", "{}"]),
    "nothing inside of something": ([{"a": {}}, {"a": {}}], ['{"a": {}}', '{"a": {}}']),
    "an integer that is too large": ([2**63, 1], [str(2**63), "1"]),
    "an integer that no float holds": ([2**53 + 1, 0.5], [str(2**53 + 1), "0.5"]),
    "such an integer inside": ([{"n": 2**53 + 1}, {"n": 0.5}], ['{"n": 9007199254740993}', '{"n": 0.5}']),
    "half a character in a key": ([{"n": {"\ud800": 1}}], ['{"n": {"\ufffd": 1}}']),
    "lists of two types": ([[1], ["a"]], ["[1]", '["a"]']),
}


@pytest.mark.parametrize("block", [1 << 20, 16])
@pytest.mark.parametrize("name", MIXED)
def test_a_column_without_one_type_becomes_text_where_types_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, block: int
) -> None:
    monkeypatch.setattr(jsonl, "_BLOCK_BYTES", block)
    values, expected = MIXED[name]
    path = tmp_path / "a.jsonl"
    path.write_text(
        "".join(json.dumps({"odd": each, "query": "q", "n": 1, "passage": "p"}) + "\n" for each in values)
    )
    output = scored(tmp_path / "o.parquet", opened(path))
    table = pq.read_table(output)
    assert table.column_names == ["odd", "query", "n", "passage", "score"]
    assert (table["odd"].to_pylist(), table["n"].type) == (expected, pa.int64())
    assert "no one type fits all values of column 'odd': the output has their text" in caplog.text


TYPED: list[tuple[list[Any], pa.DataType]] = [
    ([1, None, 2], pa.int64()),
    ([1, 2.5, None], pa.float64()),
    ([None, None], pa.null()),
    ([True, None], pa.bool_()),
    (["2024-01-01", "2024-01-01T00:00:00Z"], pa.string()),
    ([[], [1]], pa.list_(pa.int64())),
    ([{"a": 1}, {"b": "x"}], pa.struct({"a": pa.int64(), "b": pa.string()})),
    ([{"a": {}}, {"a": {"b": 1}}], pa.struct({"a": pa.struct({"b": pa.int64()})})),
    (["\ud800x", "y"], pa.string()),
]


@pytest.mark.parametrize("block", [1 << 20, 16])
@pytest.mark.parametrize(("values", "kind"), TYPED, ids=str)
def test_a_column_with_one_type_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: list[Any], kind: pa.DataType, block: int
) -> None:
    monkeypatch.setattr(jsonl, "_BLOCK_BYTES", block)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"query": "q", "passage": "p", "x": each}) + "\n" for each in values))
    assert opened(path).schema.field("x").type == kind
    assert pq.read_table(scored(tmp_path / "o.parquet", opened(path))).num_rows == len(values)


@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_csv_gets_the_text_of_every_value(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "a.jsonl"
    row = {"query": "q", "passage": 'p, "x"', "id": 7, "more": [1, {"a": None}], "ok": True, "none": None}
    path.write_text(json.dumps(row) + "\n" + json.dumps({**row, "id": "x"}))
    found = scored(tmp_path / f"o.{ending}", opened(path, typed=False)).read_text().splitlines()
    more = '[1, {"a": null}]'
    if ending == "csv":
        expected = [
            'q,"p, ""x""",7,"[1, {""a"": null}]",true,,0.5',
            'q,"p, ""x""",x,"[1, {""a"": null}]",true,,1.5',
        ]
    else:
        expected = [f'q\tp, "x"\t{key}\t{more}\ttrue\t\t{score}' for key, score in (("7", 0.5), ("x", 1.5))]
    assert found[1:] == expected


TIMES = pa.table(
    {
        "query": ["q"], "passage": ["p"],
        "odd": pa.array([1_700_000_000_000_000_001], pa.timestamp("ns")),
        "zone": pa.array([0], pa.timestamp("us", "Europe/Berlin")),
        "time": pa.array([1], pa.time64("ns")),
        "far": pa.array([-800_000], pa.int32()).cast(pa.date32()),
        "deep": pa.array(
            [{"at": [dt.datetime(2024, 1, 1)]}], pa.struct({"at": pa.list_(pa.timestamp("ns"))})
        ),
        "map": pa.array([[("k", dt.date(2024, 1, 1))]], pa.map_(pa.string(), pa.date32())),
        "kind": pa.array([dt.date(2024, 1, 1)], pa.date32()).dictionary_encode(),
    }
)  # fmt: skip


def test_times_become_text_as_arrow_prints_them(tmp_path: Path) -> None:
    pq.write_table(TIMES, tmp_path / "a.parquet")
    (line,) = scored(tmp_path / "o.jsonl", opened(tmp_path / "a.parquet")).read_text().splitlines()
    assert json.loads(line) == {
        "query": "q", "passage": "p", "odd": "2023-11-14 22:13:20.000000001",
        "zone": "1970-01-01 01:00:00.000000+0100", "time": "00:00:00.000000001",
        "far": "-0221-09-04",
        "deep": {"at": ["2024-01-01 00:00:00.000000000"]}, "map": [["k", "2024-01-01"]], "kind": "2024-01-01",
        "score": 0.5,
    }  # fmt: skip
    flat = TIMES.drop_columns(["deep", "map"])
    pq.write_table(flat, tmp_path / "b.parquet")
    values = scored(tmp_path / "o.csv", opened(tmp_path / "b.parquet")).read_text().splitlines()[1].split(",")
    assert values[2:4] == ["2023-11-14 22:13:20.000000001", "1970-01-01 01:00:00.000000+0100"]


def test_a_column_without_a_type_and_uuids_are_text_in_csv(tmp_path: Path) -> None:
    ids = pa.array([b"0123456789abcdef", None], pa.binary(16))
    columns = {"query": ["q", "q"], "passage": ["p", "p"], "none": pa.nulls(2),
               "id": pa.ExtensionArray.from_storage(pa.uuid(), ids)}  # fmt: skip
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    for ending in ("csv", "tsv"):
        lines = scored(tmp_path / f"o.{ending}", opened(tmp_path / "a.parquet")).read_text().splitlines()
        assert [line.replace("\t", ",").split(",")[2:4] for line in lines[1:]] == [
            ["", "30313233-3435-3637-3839-616263646566"], ["", ""]
        ]  # fmt: skip


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_a_time_that_text_cannot_hold_is_named_before_any_work(
    tmp_path: Path, ending: str, nested: bool
) -> None:
    far = pa.array([0, 10**12], pa.timestamp("s"))
    column = pa.StructArray.from_arrays([far], ["at"]) if nested else far
    pq.write_table(
        pa.table({"query": ["q"] * 2, "passage": ["p"] * 2, "when": column}), tmp_path / "a.parquet"
    )
    message = "CSV cannot hold column 'when'" if nested and ending == "csv" else (
        r"row 1 \(counted from 0\): column 'when' holds a time that text cannot hold.* ends in .parquet"
    )  # fmt: skip
    with pytest.raises(InputError, match=message):
        scored(tmp_path / f"o.{ending}", opened(tmp_path / "a.parquet"))
    scored(tmp_path / "o.parquet", opened(tmp_path / "a.parquet"))  # the way out


@pytest.mark.parametrize(
    "column", [pa.array([b"x"], pa.binary_view()), pa.array([None], pa.month_day_nano_interval())]
)
def test_what_json_cannot_hold_is_said_before_any_work(tmp_path: Path, column: pa.Array) -> None:
    with pa.ipc.new_file(
        tmp_path / "a.arrow", pa.schema({"query": "string", "passage": "string", "x": column.type})
    ) as file:
        file.write(pa.record_batch({"query": ["q"], "passage": ["p"], "x": column}))
    with pytest.raises(InputError, match="JSON cannot hold column 'x'"):
        scored(tmp_path / "o.jsonl", opened(tmp_path / "a.arrow"))


INTERVAL = pa.array([pa.MonthDayNano([1, 2, 3])])
_ZERO = pa.array([0])
UNION = pa.UnionArray.from_dense(_ZERO.cast(pa.int8()), _ZERO.cast(pa.int32()), [_ZERO, pa.array(["a"])])
TENSOR = pa.ExtensionArray.from_storage(
    pa.fixed_shape_tensor(pa.int32(), [2]), pa.array([[1, 2]], pa.list_(pa.int32(), 2))
)


@pytest.mark.parametrize(
    ("column", "cannot", "can"),
    [
        (INTERVAL, ["parquet", "csv", "tsv", "jsonl"], ["arrow"]),
        (pa.ListArray.from_arrays([0, 1], INTERVAL), ["parquet", "csv", "jsonl"], ["arrow"]),
        (UNION, ["parquet", "csv"], ["jsonl"]),
        (pa.array([{}], pa.struct([])), ["parquet", "csv"], ["jsonl"]),
        (TENSOR, ["csv", "tsv"], ["parquet", "jsonl"]),
        (pa.array([b"x"]), ["jsonl"], ["parquet"]),
        (pa.array([5], pa.duration("s")), ["csv", "tsv", "jsonl"], ["parquet"]),
        (pa.StructArray.from_arrays([_ZERO, _ZERO], ["a", "a"]), ["jsonl", "csv"], ["parquet"]),
    ],
    ids=["interval", "intervals", "union", "empty", "tensor", "bytes", "duration", "twice"],
)
def test_a_format_that_cannot_hold_a_column_names_those_that_can(
    tmp_path: Path, column: pa.Array, cannot: list[str], can: list[str]
) -> None:
    batch = pa.record_batch({"query": ["q"], "passage": ["p"], "x": column})
    with pa.ipc.new_file(tmp_path / "a.arrow", batch.schema) as file:
        file.write(batch)
    for ending in cannot:
        with pytest.raises(InputError, match=f"cannot hold column 'x'.* ends in .{' or .'.join(can)}$"):
            scored(tmp_path / f"o.{ending}", opened(tmp_path / "a.arrow"))
    for ending in can:
        scored(tmp_path / f"o.{ending}", opened(tmp_path / "a.arrow"))


def _encoded(*values: Any, kind: pa.DataType | None = None) -> pa.Array:
    """The values as a dictionary with one entry for each, also for null."""
    return pa.DictionaryArray.from_arrays(pa.array(range(len(values))), pa.array(values, kind))


_THREE = [0, 1, 2, 3]
NULLS = pa.nulls(3)
CATEGORIES = _encoded("a", None, "b")
ODD_COLUMNS = {
    "categories": CATEGORIES,
    "numbers": _encoded(1, None, 3),
    "bytes": _encoded(b"a", None, b"b"),
    "views": _encoded("a", None, "b", kind=pa.string_view()),
    "views of bytes": _encoded(b"a", None, b"b", kind=pa.binary_view()),
    "durations": _encoded(dt.timedelta(1), None, dt.timedelta(2)),
    "nothing": _encoded(None, None, None),
    "list": pa.ListArray.from_arrays(_THREE, CATEGORIES),
    "struct": pa.StructArray.from_arrays([CATEGORIES], ["a"]),
    "map": pa.MapArray.from_arrays(_THREE, pa.array(["x", "y", "z"]), CATEGORIES),
    "fixed": pa.FixedSizeListArray.from_arrays(CATEGORIES, 1),
    "list of nulls": pa.ListArray.from_arrays(_THREE, NULLS),
    "struct of nulls": pa.StructArray.from_arrays([NULLS], ["a"]),
    "fixed lists of nulls": pa.FixedSizeListArray.from_arrays(NULLS, 1),
    "json": pa.ExtensionArray.from_storage(
        pa.json_(pa.string_view()), pa.array(["[]", None, "{}"], pa.string_view())
    ),
}


@pytest.mark.parametrize("name", ODD_COLUMNS)
@pytest.mark.parametrize("ranked", [False, True])
def test_dictionaries_and_nulls_at_any_depth_are_written(tmp_path: Path, name: str, ranked: bool) -> None:
    column = ODD_COLUMNS[name]
    batch = pa.record_batch({"query": ["q"] * 3, "passage": ["p"] * 3, "x": column})
    with pa.ipc.new_file(tmp_path / "a.arrow", batch.schema) as file:
        file.write(batch)
    form = {"top_k": 3} if ranked else {}
    expected = column.to_pylist()[:: -1 if ranked else 1]
    for ending in ("parquet", "arrow"):
        output = scored(tmp_path / f"o.{ending}", opened(tmp_path / "a.arrow"), **form)
        (table,) = opened(output).tables(Sizing(9))
        assert table["x"].to_pylist() == expected
    if not {"bytes", "durations"} & set(name.split()):
        lines = scored(tmp_path / "o.jsonl", opened(tmp_path / "a.arrow"), **form).read_text().splitlines()
        assert len(lines) == 3


@pytest.mark.parametrize("rows", [1, 2])
def test_lists_of_categories_are_read_from_several_row_groups(tmp_path: Path, rows: int) -> None:
    lists = pa.ListArray.from_arrays(_THREE, pa.array(["a", "b", "a"]).dictionary_encode())
    table = pa.table({"query": ["q"] * 3, "passage": ["p"] * 3, "x": lists})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=rows)
    output = scored(tmp_path / "o.parquet", opened(tmp_path / "a.parquet"))
    assert pq.read_table(output)["x"].to_pylist() == lists.to_pylist()


@pytest.mark.parametrize(
    "column",
    [
        pa.DictionaryArray.from_arrays([0], pa.array([[1]])),
        pa.DictionaryArray.from_arrays([0], pa.array([{"a": 1}])),
        pa.array([[]], pa.list_(pa.int64(), 0)),
    ],
    ids=["lists", "structs", "size 0"],
)
def test_what_arrow_cannot_cast_is_refused_before_any_work(tmp_path: Path, column: pa.Array) -> None:
    batch = pa.record_batch({"query": ["q"], "passage": ["p"], "x": column})
    with pa.ipc.new_file(tmp_path / "a.arrow", batch.schema) as file:
        file.write(batch)
    with pytest.raises(InputError, match=r"column 'x' holds .* cannot be read; write plain lists"):
        opened(tmp_path / "a.arrow")


def test_a_null_in_a_dictionary_of_queries_is_a_null_query(tmp_path: Path) -> None:
    batch = pa.record_batch({"query": CATEGORIES, "passage": ["p"] * 3})
    with pa.ipc.new_file(tmp_path / "a.arrow", batch.schema) as file:
        file.write(batch)
    with pytest.raises(InputError, match=r"row 1 \(counted from 0\) has a null"):
        open_source(find_files([str(tmp_path / "a.arrow")]), PAIRS, allow_nulls=False)


def test_an_unknown_zone_is_named_before_any_work(tmp_path: Path) -> None:
    nowhere = pa.array([0, 1], pa.timestamp("s", "No/Where"))
    batch = pa.record_batch({"query": ["q"] * 2, "passage": ["p"] * 2, "x": nowhere})
    with pa.ipc.new_file(tmp_path / "a.arrow", batch.schema) as file:
        file.write(batch)
    with pytest.raises(InputError, match=r"the times of column 'x': .*No/Where"):
        scored(tmp_path / "o.csv", opened(tmp_path / "a.arrow"))
    scored(tmp_path / "o.arrow", opened(tmp_path / "a.arrow"))


@pytest.mark.parametrize("zone", [None, "No/Where"])
def test_parquet_has_the_times_that_only_text_cannot_hold(tmp_path: Path, zone: str | None) -> None:
    seconds = [0, 2**50]  # a year that Arrow does not print
    column = pa.array(seconds, pa.timestamp("s", zone))
    batch = pa.record_batch({"query": ["q"] * 2, "passage": ["p"] * 2, "x": column})
    with pa.ipc.new_file(tmp_path / "a.arrow", batch.schema) as file:
        file.write(batch)
    output = scored(tmp_path / "o.parquet", opened(tmp_path / "a.arrow"))
    assert pq.read_table(output)["x"].cast(pa.int64()).to_pylist() == [1000 * second for second in seconds]


def test_text_that_is_not_utf_8_is_named_for_json(tmp_path: Path) -> None:
    bad = pa.array([b"\xff"]).view(pa.string())
    pq.write_table(pa.table({"query": ["q"], "passage": ["p"], "x": bad}), tmp_path / "a.parquet")
    with pytest.raises(
        InputError, match=r"column 'x' .* UTF-8, which JSON cannot hold; name an output .* \.parquet"
    ):
        scored(tmp_path / "o.jsonl", opened(tmp_path / "a.parquet"))


@pytest.mark.parametrize("ending", ["parquet", "arrow", "jsonl", "csv"])
@pytest.mark.parametrize("stream", [False, True])
def test_categories_of_polars_are_written_in_every_format(tmp_path: Path, ending: str, stream: bool) -> None:
    kinds: Any = {"query": pl.Categorical, "kind": pl.Enum(["x", "y"])}
    frame = pl.DataFrame(
        {"query": ["q", "r"], "passage": ["p", "s"], "kind": ["x", None]}, schema_overrides=kinds
    )
    if ending != "csv":
        frame = frame.with_columns(pl.concat_list(pl.col("kind")).alias("more"))
    (frame.write_ipc_stream if stream else frame.write_ipc)(
        tmp_path / "a.arrow", compat_level=pl.CompatLevel.newest()
    )
    output = scored(tmp_path / f"o.{ending}", opened(tmp_path / "a.arrow"))
    back = opened(output)
    (table,) = back.tables(Sizing(9))
    expected = [{**row, "score": n + 0.5} for n, row in enumerate(frame.to_dicts())]
    if ending == "csv":
        expected = [{**row, "score": str(row["score"])} for row in expected]
    assert table.to_pylist() == expected
