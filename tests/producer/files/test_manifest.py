"""What an output was made from: a change is told in one line."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rankmill.producer.files.manifest import differences, manifest
from rankmill.producer.files.stores.reading import fingerprint


def test_all_bytes_of_a_model_s_files_count_and_their_times_do_not(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    weights = bytearray(300_000)
    (model / "model.safetensors").write_bytes(weights)
    before = manifest({}, [str(model)], {}, tmp_path / "cache")
    (model / "model.safetensors").touch()
    assert manifest({}, [str(model)], {}, tmp_path / "cache") == before
    weights[150_000] = 1
    (model / "model.safetensors").write_bytes(weights)
    told = differences(before, manifest({}, [str(model)], {}, tmp_path / "cache"))
    assert told.startswith(f"model file {model / 'model.safetensors'} was 300,000 bytes (digest ")


def test_a_changed_template_is_told_in_one_line(tmp_path: Path) -> None:
    before, now = (
        manifest({}, ["m"], {"prompt_template": "{{ messages }}\n" * 9 + end, "label": "a"}, tmp_path)
        for end in ("yes", "no")
    )
    assert differences(before, before) == ""
    told = differences(before, now)
    assert told.startswith("--prompt-template was '{{ messages }}\\n")
    assert "\n" not in told
    assert len(told) < 300
    assert differences(before, manifest({}, ["m"], {"label": "b"}, tmp_path)).startswith(
        "--label was a and is b"
    )


def test_a_file_is_known_again_in_another_time_zone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run may continue on another host, or from a crontab."""
    (tmp_path / "a.csv").write_text("query,passage\n")
    marks = set()
    try:
        for zone in ("UTC", "Asia/Tokyo"):
            monkeypatch.setenv("TZ", zone)
            time.tzset()
            marks.add(fingerprint(tmp_path / "a.csv"))
    finally:
        monkeypatch.undo()
        time.tzset()
    assert len(marks) == 1
