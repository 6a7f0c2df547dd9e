"""docs/reference/commands.md: each command with its options and exit codes, as click has them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click

from rankmill.cli.main import rankmill

NAMES = {"rankmill score": "score-file", "rankmill workers start": "score-workers"}
"""Commands that have a name of their own."""

LIKE = {"rankmill submit": "rankmill score"}
"""Commands with the options of another one: only what differs is shown."""

_INTRO = """\
# Commands

`rankmill COMMAND --help` shows the same in a terminal. A setting that has no option here can be set in a file
or in the environment: [settings](settings.md).

This page is made from the code (`python -m tests.harness.reference`).
"""

_COMPLETION = """
## Complete commands in a shell

Put these lines into the start-up file of bash, zsh or fish, with the shell's name in them. The shell then
completes commands, options and their values.

```sh
eval "$(_RANKMILL_COMPLETE=bash_source rankmill)"          # into ~/.bashrc
eval "$(_SCORE_FILE_COMPLETE=bash_source score-file)"
eval "$(_SCORE_WORKERS_COMPLETE=bash_source score-workers)"
```
"""


def page() -> str:
    """The page."""
    top = click.Context(rankmill, info_name="rankmill", **rankmill.context_settings)
    found = list(_commands(top))
    parts = [_INTRO, "\n", _contents(found), *map(_section, found)]
    parts += ["\n## Exit codes of rankmill\n", _epilog(rankmill.epilog or ""), _COMPLETION]
    return "".join(parts)


def _commands(context: click.Context) -> Iterator[click.Context]:
    group = context.command
    assert isinstance(group, click.Group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        below = click.Context(command, info_name=name, parent=context, **command.context_settings)
        if not isinstance(command, click.Group) or command.invoke_without_command:
            yield below
        if isinstance(command, click.Group):
            yield from _commands(below)


def _title(context: click.Context) -> str:
    return NAMES.get(context.command_path, context.command_path)


def _contents(found: list[click.Context]) -> str:
    rows = ["| command | what it does |", "| --- | --- |"]
    for context in found:
        title = _title(context)
        rows.append(
            f"| [`{title}`](#{title.replace(' ', '-')}) | {_code(context.command.get_short_help_str(200))} |"
        )
    return "\n".join(rows) + "\n"


def _section(context: click.Context) -> str:
    command, path = context.command, context.command_path
    words = " ".join(command.collect_usage_pieces(context))
    title = _title(context)
    lines = [f"\n## {title}\n", f"\n    {title} {words}\n"]
    if title != path:
        lines.append(f"\nAlso called `{path}`.\n")
    lines.append(f"\n{_paragraphs(command.help or '')}\n")
    rows = _rows(context)
    if path in LIKE:
        of = next(each for each in _commands(context.find_root()) if each.command_path == LIKE[path])
        others = _rows(of)
        lacks = ", ".join(f"`--{name}`" for name in others if name not in rows)
        rows = {name: row for name, row in rows.items() if row != others.get(name)}
        title = _title(of)
        lines.append(f"\nOf the options of [{title}](#{title}) it lacks {lacks}. These differ:\n")
    if rows:
        lines += ["\n| option | meaning | default |\n| --- | --- | --- |\n", *rows.values()]
    return "".join(lines) + _epilog(command.epilog or "")


def _rows(context: click.Context) -> dict[str, str]:
    """The options' lines, by name."""
    found = {str(each.name): _row(each, context) for each in context.command.get_params(context)}
    return {name: row for name, row in found.items() if row}


def _row(parameter: click.Parameter, context: click.Context) -> str:
    record = parameter.get_help_record(context)
    if record is None or not isinstance(parameter, click.Option) or "--help" in parameter.opts:
        return ""
    names, text = record
    text = re.sub(r" \(\d+ here\)", "", text)  # the cores of this host
    found = re.search(r"(?: {2}\[[^\]]*\])+$", text)
    notes = re.findall(r" {2}\[([^\]]*)\]", found[0]) if found else []
    text = text[: found.start()] if found else text
    default = ""
    for note in (part for each in notes for part in each.split("; ")):
        if note.startswith("default: "):
            default = note.removeprefix("default: ")
        else:
            text += f" ({_bound(note)})"
    default = "" if default == "False" else default
    text += " [All values](settings.md)" if "…" in names else ""
    names = ", ".join(f"`{name}`" for name in names.split(", "))
    return f"| {_cell(names)} | {_cell(text)} | {_cell(default)} |\n"


def _bound(note: str) -> str:
    if both := re.fullmatch(r"(\d+)<=x<=(\d+)", note):
        return f"{both[1]} to {both[2]}"
    return note.replace("x>=", "at least ").replace("x>", "more than ")


def _cell(text: str) -> str:
    return _code(re.sub(r"<([^<>]+)>", r"`<\1>`", text)).replace("|", "\\|")


def _code(text: str) -> str:
    """Options in a text as code."""
    return re.sub(r"(?<![\w`-])(--[a-z][\w-]*)(?![\w`])", r"`\1`", text)


def _paragraphs(text: str) -> str:
    blocks = text.replace("\f", "").strip().split("\n\n")
    return "\n\n".join(
        "```text\n" + block[2:] + "\n```" if block.startswith("\b\n") else _code(" ".join(block.split()))
        for block in blocks
    )


def _epilog(text: str) -> str:
    """What stands at the end of the help: exit codes as a table, all else as paragraphs."""
    parts = []
    for block in text.replace("\b\n", "").strip().split("\n\n"):
        if block.startswith("Exit codes:"):
            codes = re.findall(r"^ +(\d+) +(.*(?:\n {7}.*)*)", block, re.M)
            rows = [f"| {code} | {' '.join(meaning.split())} |" for code, meaning in codes]
            parts.append("\n".join(["| exit code | meaning |", "| --- | --- |", *rows]))
        elif block:
            parts.append(_code(" ".join(block.split()).replace("<NAME>", "NAME")))
    return "".join(f"\n{part}\n" for part in parts)
