"""score-file and clients score texts and conversations, from end to end."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rankmill import Client
from rankmill.jobs.contract.errors import InputError, RunFailed
from rankmill.jobs.contract.file_request import FileRequest
from rankmill.jobs.runtime.settings import load_settings
from rankmill.producer.client.runs import ScoringRun
from rankmill.score.score_file import score_file as score
from rankmill.workers.models.conversations import exchange
from tests.conftest import Server, StartWorker, score_file
from tests.harness.models.rerankers import make_decoder
from tests.workers.models.test_texts import TEMPLATE

TEXTS = ["the moon", None, "big cat", "the moon", "tea and bread"]


def test_texts_of_files_and_clients_have_the_same_scores(
    server: Server, tiny_model: Path, workers: StartWorker, tmp_path: Path
) -> None:
    workers()
    source, output = tmp_path / "docs.parquet", tmp_path / "out.parquet"
    pq.write_table(pa.table({"body": TEXTS, "lists": [["a"]] * 5}), source)
    command = [source, "--text-column", "body", "--model", tiny_model, "--precision", "fp32", "-o", output]
    done = score_file(*command, "--redis", server.url)
    assert done.code == 3, done.err
    table = pq.read_table(output)
    assert table.column_names == ["body", "lists", "score"]
    with Client(server.url, model=str(tiny_model), precision="fp32") as client:
        scores = client.score(texts=TEXTS, timeout=60)
        again = client.score(texts=pa.table({"text": TEXTS}), timeout=60)
        run = client.attach(client.submit(texts=TEXTS, detached=True).id)
        assert isinstance(run, ScoringRun)
        np.testing.assert_array_equal(run.scores(60), scores)
    assert scores.errors == {1: "text is null"}
    np.testing.assert_allclose(np.array(table["score"].to_pylist(), np.float32), scores, atol=1e-5)
    np.testing.assert_array_equal(again, scores)
    assert pq.read_metadata(output).metadata[b"rankmill.inputs"] == b"texts"
    verified = score_file("--verify", output, "--redis", server.url)
    assert verified.code == 0, verified.err
    reused = score_file(*command[:-1], tmp_path / "b.parquet", "--reuse", output, "--redis", server.url)
    assert "4 of them have their score from" in reused.out, reused.err
    refused = score_file(*command[:2], "lists", *command[3:], "--force", "--redis", server.url)
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "not text" in refused.err


_CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }} "
    "{% if m.call is defined %}{{ m.call | tojson }}{% endif %}<|im_end|>{% endfor %}"
)


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_conversation_is_scored_as_it_is_whatever_other_rows_hold(
    server: Server, workers: StartWorker, tmp_path: Path, ending: str
) -> None:
    """Types that fit all rows would make 3 of 3.0, add keys and null, and change their order."""
    model = make_decoder(tmp_path / "model", "qwen3", task="classifier", template=_CALLS)
    workers()
    calls = [{"n": 3}, {"n": 3.5}, {"b": 1, "a": None}, {"a": "x", "b": 1}, {}, [1, "x"], {"n": 2**63}]
    rows = [{"messages": [{"role": "user", "content": "moon", "call": call}]} for call in calls]
    source, output = tmp_path / "in.jsonl", tmp_path / f"out.{ending}"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = score_file(
        source, "--messages-column", "messages", "--model", model, "--precision", "fp32", "-o", output,
        "--redis", server.url,
    )  # fmt: skip
    assert done.code == 0, done.err
    with Client(server.url, model=str(model), precision="fp32") as client:
        expected = client.score(messages=[row["messages"] for row in rows], timeout=60)
    if ending == "jsonl":
        scores = [json.loads(line)["score"] for line in output.read_text().splitlines()]
    else:
        scores = pq.read_table(output)["score"].to_pylist()
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    assert len(set(np.round(expected, 5))) == len(calls)


def test_a_pair_of_conversations_gets_both_scores(
    server: Server, workers: StartWorker, tmp_path: Path
) -> None:
    model = make_decoder(tmp_path / "model", "qwen3", task="classifier", template=TEMPLATE)
    workers()
    rows: list[dict[str, Any]] = [
        {"id": 1, "chosen": exchange("why", "moon"), "rejected": exchange("why", "big cat")},
        {"id": 2, "chosen": exchange("how", "tea"), "rejected": [{"role": "tool", "content": "x"}]},
    ]
    source, output = tmp_path / "pairs.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = score_file(
        source, "--messages-column", "chosen,rejected", "--model", model, "--precision", "fp32",
        "-o", output, "--redis", server.url,
    )  # fmt: skip
    assert done.code == 3, done.err
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert [{name: row[name] for name in rows[0]} for row in found] == rows
    with Client(server.url, model=str(model), precision="fp32") as client:
        chosen = client.score(messages=[row["chosen"] for row in rows], timeout=60)
        rejected = client.score(messages=[row["rejected"] for row in rows], timeout=60)
    np.testing.assert_allclose([row["score_chosen"] for row in found], chosen, atol=1e-5)
    np.testing.assert_allclose(found[0]["score_rejected"], rejected[0], atol=1e-5)
    assert found[1]["score_rejected"] is None
    assert "no tool here" in rejected.errors[1]
    listed = json.loads((tmp_path / "out.jsonl.errors.jsonl").read_text())
    assert listed["error"].startswith("rejected: ")


def test_both_columns_of_conversations_have_the_revision_that_was_named(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []

    def start(client: Client, *_: object, model: str, revision: str, **__: object) -> Any:
        asked.append((model, revision))
        if len(asked) == 2:
            raise RunFailed("that is enough")
        return SimpleNamespace(cancel=lambda: None)

    monkeypatch.setattr(Client, "start", start)
    row = {"chosen": exchange("why", "moon"), "rejected": exchange("why", "big cat")}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row) + "\n")
    request = FileRequest(
        inputs=(str(tmp_path / "pairs.jsonl"),), messages_column=("chosen", "rejected"),
        output=str(tmp_path / "out.jsonl"),
    )  # fmt: skip
    settings = load_settings({"redis_url": server.url, "model": "some/model", "revision": "v1.0"})
    with pytest.raises(InputError, match="that is enough"):
        score(request, settings)
    assert asked == [("some/model", "v1.0")] * 2
