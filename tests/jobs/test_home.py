"""Paths with ``~``, wherever a name comes from: shells leave it as it is in ``--output=~/x`` and in files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rankmill import Client
from rankmill.jobs.contract.errors import ConfigError
from rankmill.jobs.contract.home import expanded, of_user
from rankmill.producer.files.stores.paths import as_path, workspace_of
from rankmill.producer.files.stores.roots import Roots
from tests.conftest import Server, run_command, score_file

UNKNOWN = 54321


def test_files_and_models_of_the_home_are_found(
    tmp_path: Path, shared_queue: Server, tiny_model: Path
) -> None:
    (tmp_path / "in.csv").write_text("query,passage\na,b\n")
    (tmp_path / "model").symlink_to(tiny_model)
    environ = {"HOME": str(tmp_path)}
    done = score_file(
        "~/i*.csv", "--model=~/model", "--redis", shared_queue.url, "--output=~/out.csv",
        cwd=tiny_model, environ=environ,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert (tmp_path / "out.csv").read_text().startswith("query,passage,score\n")
    checked = run_command("rankmill", "evaluate", "--qrels=~/none.tsv", "~/out.csv", environ=environ)
    assert f"{tmp_path}/out.csv: no column" in checked.err


def test_a_client_names_its_own_home_to_workers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shared_server: Server, tiny_model: Path
) -> None:
    """A worker would look in the home of its own user, where another model may lie."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").symlink_to(tiny_model)
    with Client(shared_server.url, model="~/model") as client:
        run = client.submit([("a", "b")])
        assert run.model == str(tiny_model)
        run.cancel()


def test_roots_of_a_runner_may_be_in_its_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    roots = Roots(["~/in"], ["~/out"])
    roots.check_name("~/in/x.csv", "read")
    roots.check(as_path("~/out/y.csv"), "write")


def test_a_name_that_only_looks_like_a_home_stays_as_it_is() -> None:
    assert expanded("~$draft.csv") == Path("~$draft.csv")


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown uid of a container got a traceback."""
    for name in ("HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: UNKNOWN)
    with pytest.raises(ConfigError, match=r"has no home for ~/.local/state: set XDG_STATE_HOME to a folder"):
        workspace_of(as_path("s3://bucket/x.parquet"))
    with pytest.raises(ConfigError, match=r"has no home for ~/.cache: set XDG_CACHE_HOME to a folder"):
        of_user("~/.cache", "XDG_CACHE_HOME")
    assert as_path("~/x.csv") == Path("~/x.csv")
    assert of_user("/data", "X") == Path("/data")
