"""The names of `rankmill`: what is documented is there, and type checkers find what a caller gets wrong."""

from __future__ import annotations

import builtins
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_type_hints

import pytest

import rankmill
from rankmill.jobs.runtime.settings import Settings, SettingsOptions, extension_settings
from tests.harness.documents import ROOT


def raised(kind: type) -> Iterator[str]:
    """The errors that the docstrings of a class and its methods name."""
    for member in (kind, *(value for name, value in vars(kind).items() if name[0] != "_")):
        _, _, section = (inspect.getdoc(member) or "").partition("\nRaises\n------\n")
        for names in re.findall(r"^(\w+(?:, \w+)*)$", section.partition("\n---")[0], re.M):
            yield from names.split(", ")


def test_every_documented_error_is_imported_from_the_package() -> None:
    public = [*rankmill.__all__, *rankmill._OF_EXTENSIONS]
    classes = [found for name in public if inspect.isclass(found := getattr(rankmill, name))]
    named = {name for kind in classes for name in raised(kind)}
    assert {"RunTimeout", "RunFailed", "ConfigError", "RunExpired"} <= named
    assert [
        name for name in sorted(named) if not hasattr(rankmill, name) and not hasattr(builtins, name)
    ] == []


def test_the_options_of_a_client_are_the_settings() -> None:
    given, kept = get_type_hints(SettingsOptions), get_type_hints(Settings)
    added = {key: get_type_hints(kind)[key] for key, kind in extension_settings().items() if key in given}
    assert added.keys() == {"registry", "file_queue", "file_run_ttl"}  # what a client has to do with
    kept |= added
    assert given.keys() == Settings.model_fields.keys() - {"redis_url"} | added.keys()  # a parameter
    looser = {"label", *(name for name in given if kept[name] == tuple[str, ...])}
    wrong = [name for name in given if name not in looser and given[name] != kept[name] | None]
    assert not wrong


@pytest.mark.slow
def test_a_type_checker_finds_wrong_calls_in_a_project_without_stubs(tmp_path: Path) -> None:
    """``make check`` has the stubs of pandas; a library without types must not turn a union into anything."""
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\nstrict = true\nfollow_imports = silent\n"
        "[mypy-pandas.*,pyarrow.*,opentelemetry.*]\nignore_missing_imports = true\nfollow_imports = skip\n"
    )
    options = ["--config-file", str(tmp_path / "mypy.ini"), "--cache-dir", str(tmp_path)]
    command = [sys.executable, "-m", "mypy", *options, "tests/project/calls.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_package_imports_nothing_before_a_name_is_used() -> None:
    code = "import __future__, sys; before = {*sys.modules}; import rankmill; print({*sys.modules} - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "{'rankmill'}"
