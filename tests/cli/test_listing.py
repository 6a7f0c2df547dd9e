"""``rankmill --help``: all commands by purpose, without importing one; and what extensions add."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from rankmill import plugins
from rankmill.cli.main import listed_commands, rankmill


@pytest.fixture(autouse=True)
def _forgets() -> Iterator[None]:
    plugins._named.cache_clear()
    yield
    plugins._named.cache_clear()


class Older:
    """A distribution without what the code looks for."""

    entry_points = importlib.metadata.EntryPoints()


def add(monkeypatch: pytest.MonkeyPatch, *added: importlib.metadata.EntryPoint) -> None:
    """Add entry points to those of the installed packages."""
    installed = importlib.metadata.entry_points

    def entry_points(group: str) -> list[importlib.metadata.EntryPoint]:
        return [*installed(group=group), *(each for each in added if each.group == group)]

    monkeypatch.setattr(plugins, "entry_points", entry_points)


def commands_at(value: str, name: str = "other") -> importlib.metadata.EntryPoint:
    return importlib.metadata.EntryPoint(name, value, "rankmill.commands")


OTHERS = {
    "count": ("Score", "Count pairs.", "rankmill.cli.status:status"),
    "fly": ("Travel", "Fly.", "rankmill.cli.status:status"),
    "score": ("Score", "Not the core's.", "rankmill.cli.status:status"),
}


def test_the_listed_line_is_that_of_the_command() -> None:
    context = click.Context(rankmill)
    commands, problems = listed_commands()
    assert problems == []
    lines = {name: text for name, (_, text, _) in commands.items()}
    found = {name: rankmill.get_command(context, name) for name in lines}
    shown = {name: command.get_short_help_str(limit=200) for name, command in found.items() if command}
    assert {name: f"{line.rstrip('.')}." for name, line in shown.items()} == lines


def test_the_commands_are_listed_without_what_they_import() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from rankmill.cli.main import rankmill\n"
        "assert 'quantize' in CliRunner().invoke(rankmill, ['--help']).output\n"
        "print({'numpy', 'pyarrow', 'redis', 'pydantic', 'rich', 'rq'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_package_adds_commands_and_takes_no_name_of_the_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add(monkeypatch, commands_at("tests.cli.test_listing:OTHERS"))
    shown = CliRunner().invoke(rankmill, ["--help"]).output
    assert "Count pairs." in shown
    assert "\nTravel:\n  fly " in shown
    assert "Not the core's." not in shown


NUMBER, WRONG = 5, {"fly": ("Travel", "Fly.")}
BREAKS = {"break": ("Score", "Break.", "no_such_module:command")}


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("no_such_module:COMMANDS [worker]", r"'no_such_module'\); pip install .*worker\]'? installs it"),
        ("no_such_module:COMMANDS", r"repair or uninstall an unknown package"),
        ("tests.cli.test_listing:MISSING", r"has no attribute 'MISSING'"),
        ("tests.cli.test_listing:NUMBER", r"'other' of rankmill.commands is not a dictionary of commands"),
        ("tests.cli.test_listing:WRONG", r"'other' of rankmill.commands is not a dictionary of commands"),
    ],
)
def test_a_broken_package_is_one_line_and_other_commands_work(
    monkeypatch: pytest.MonkeyPatch, value: str, told: str
) -> None:
    add(monkeypatch, commands_at(value))
    for words in (["--help"], ["tune", "--help"]):
        done = CliRunner().invoke(rankmill, words)
        assert done.exit_code == 0
        assert "Find the best settings for this machine." in " ".join(done.stdout.split())
        (line,) = done.stderr.splitlines()
        assert re.search(told, line)
    core = CliRunner().invoke(rankmill, ["status", "--help"])
    assert (core.exit_code, core.stderr) == (0, "")


def test_a_command_that_cannot_be_imported_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    add(monkeypatch, commands_at("tests.cli.test_listing:BREAKS"))
    done = CliRunner().invoke(rankmill, ["break"])
    assert done.exit_code == 2
    assert re.search(r"no_such_module:command cannot be imported \(.*\); repair or uninstall", done.stderr)


def test_two_packages_cannot_add_the_same_name(monkeypatch: pytest.MonkeyPatch) -> None:
    add(monkeypatch, commands_at("one:COMMANDS"), commands_at("two:COMMANDS"))
    done = CliRunner().invoke(rankmill, ["--help"])
    assert done.exit_code == 0
    assert "two packages add 'other' to rankmill.commands" in done.stderr


def test_code_that_is_not_the_installed_one_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a change of pyproject.toml in a checkout, whose metadata is older then."""
    monkeypatch.setattr(plugins, "distribution", lambda name: Older())
    plugins._ours.cache_clear()
    try:
        done = CliRunner().invoke(rankmill, ["--help"])
    finally:
        plugins._ours.cache_clear()
    assert done.exit_code == 2
    assert re.search(r"not the one that is installed.*pip install .*worker", done.output, re.S)


@pytest.mark.parametrize("error", ["KeyError('HOME_OF_IT')", "SyntaxError('a word')"])
def test_code_of_others_may_raise_anything_and_is_named(
    error: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "raises_when_imported.py").write_text(f"raise {error}\n")
    monkeypatch.syspath_prepend(tmp_path)
    add(monkeypatch, commands_at("raises_when_imported:COMMANDS"))
    done = CliRunner().invoke(rankmill, ["--help"])
    assert done.exit_code == 0
    assert "'other' of rankmill.commands cannot be imported" in done.stderr
