"""docs/reference/python.md: the names of `rankmill`, from their docstrings."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import types
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import rankmill
from rankmill import testing
from rankmill.jobs.contract import errors
from rankmill.jobs.contract.errors import RankmillError

_INTRO = """\
# Python

```python
from rankmill import Client
```

All names below are imported from `rankmill`, those with Fake from `rankmill.testing`. This page is made from
their docstrings (`python -m tests.harness.reference`). [Score from Python](../guides/python.md) shows how
they are used.

"""

_PUBLIC = sorted({*rankmill.__all__, *rankmill._OF_EXTENSIONS})

_FIRST = (
    "Client",
    "CrossEncoder",
    "AsyncClient",
    "ScoringRun",
    "Scores",
    "Ranked",
    "Classified",
    "RunStats",
    "SubmittedFile",
)
_TESTING = ("FakeWorkers", "FakeRun", "FakeClient", "FakeAsyncClient")
"""Those of `rankmill.testing`."""

_INSIDE = {"begin", "files", "note_durability", "presence", "sizing", "start", "submit_request", "tables"}
"""Methods for rankmill's own rooms."""
_WIDTH = 88

_INHERITED = {
    "FakeAsyncClient",
    "FakeClient",
    "FakeRun",
    "Classified",
    "Connection",
    "Ranked",
    "ScoreSpec",
    "Scores",
    "ScoringWorker",
}
"""Classes whose own methods are not for callers: what they are made from is."""


def page() -> str:
    """The page."""
    others = [name for name in _PUBLIC if name not in _FIRST and not _is_error(getattr(rankmill, name))]
    names = [*_FIRST, *others]
    names += _TESTING
    contents = "\n".join(f"- [{name}](#{name.lower()}): {_first_line(name)}" for name in names)
    return _INTRO + contents + "\n" + "".join(map(_section, names)) + _errors()


def _named(name: str) -> Any:
    return getattr(testing if name in _TESTING else rankmill, name)


def _first_line(name: str) -> str:
    text = (inspect.getdoc(_named(name)) or "").split("\n\n")[0].replace("\n", " ")
    return re.sub("::$", ".", _inline(text))


def _section(name: str) -> str:
    found = _named(name)
    parts = [f"\n## {name}\n"]
    parts.append(_signature(name, found))
    parts.append(_markdown(inspect.getdoc(found) or ""))
    if inspect.isclass(found) and name not in _INHERITED:
        for attribute, text in _attributes(found):
            parts.append(f"\n### {name}.{attribute}\n{_markdown(text)}")
        for member, value in _members(found):
            parts.append(f"\n### {name}.{member}\n")
            if callable(value):
                parts.append(_signature(member, value))
            parts.append(_markdown(inspect.getdoc(value) or ""))
    return "".join(parts)


def _is_error(found: object) -> bool:
    """Whether it is one of the errors, which callers catch and do not make."""
    return inspect.isclass(found) and issubclass(found, RankmillError)


def _members(found: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that rankmill defines, in the order of its code."""
    seen: dict[str, Any] = {}
    for base in reversed([each for each in found.__mro__ if each.__module__.startswith("rankmill.")]):
        seen |= {name: value for name, value in vars(base).items() if name[0] != "_" and name not in _INSIDE}
    for name, value in seen.items():
        member = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        if (inspect.isfunction(member) or isinstance(member, property)) and inspect.getdoc(member):
            yield name, member


def _attributes(found: type) -> Iterator[tuple[str, str]]:
    """The public attributes that ``__init__`` sets and explains by a text after the line."""
    init = vars(found).get("__init__")
    if not inspect.isfunction(init) or not _is_ours(init):
        return
    function = ast.parse(textwrap.dedent(inspect.getsource(init))).body[0]
    assert isinstance(function, ast.FunctionDef)
    for line, text in pairwise(function.body):
        match line, text:
            case (
                ast.Assign([ast.Attribute(attr=name)]) | ast.AnnAssign(ast.Attribute(attr=name)),
                ast.Expr(ast.Constant(str() as words)),
            ) if not name.startswith("_"):
                yield name, inspect.cleandoc(words)


def _signature(name: str, found: Any) -> str:
    """How it is called: a line for each parameter where one line is too short."""
    function = found.__init__ if inspect.isclass(found) else found
    if not inspect.isfunction(function) or not _is_ours(function):
        return ""  # its class or a decorator has made it
    node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    words = ast.unparse(node.args).replace(" | ", "|")
    given = [_spaced(word) for word in re.split(r", (?=\w+:|\*)", words) if word not in {"self", "cls"}]
    if any(word.startswith("_") for word in given):
        return ""  # not made by callers
    returned = "" if node.returns is None or node.name == "__init__" else ast.unparse(node.returns)
    end = f") -> {returned}" if returned not in {"", "None"} else ")"
    start = "await " if isinstance(node, ast.AsyncFunctionDef) else ""
    line = f"{start}{name}({', '.join(given)}{end}"
    if len(line) > _WIDTH:
        line = f"{start}{name}(\n" + "".join(f"    {word},\n" for word in given) + end
    return f"\n```python\n{line}\n```\n"


def _is_ours(function: types.FunctionType) -> bool:
    """Whether it has source in rankmill; a dataclass' ``__init__`` has none."""
    return function.__module__.startswith("rankmill.") and function.__code__.co_filename.endswith(".py")


def _spaced(parameter: str) -> str:
    return re.sub(r"(: .*?)=", r"\1 = ", parameter, count=1).replace("|", " | ")


def _markdown(text: str) -> str:
    """A docstring as Markdown: its sections are lists."""
    parts = re.split(r"^(\w+)\n-{3,}\n", text, flags=re.M)
    shown = [_prose(parts[0])]
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        items = re.findall(r"^(\S.*)\n((?: +.*(?:\n|$)|\n)*)", body, re.M)
        rows = (
            [f"- {_inline(' '.join(body.split()))}"]
            if title == "Returns"
            else [f"- `{name}`: {_inline(' '.join(about.split()))}" for name, about in items]
        )
        shown.append(f"\n**{title}**\n\n" + "\n".join(rows) + "\n")
    return "".join(shown)


def _prose(text: str) -> str:
    shown = []
    for block in text.strip().split("\n\n"):
        if block.startswith("    "):
            shown.append(block)
        elif block.startswith(">>>"):
            shown.append(f"```python\n{block}\n```")
        elif re.match(r"- ", block):
            shown.append(_inline(block))
        else:
            shown.append(re.sub("::$", ":", _inline(" ".join(block.split()))))
    return "\n" + "\n\n".join(shown) + "\n" if text.strip() else ""


def _inline(text: str) -> str:
    return text.replace("``", "`")


def _errors() -> str:
    """Every error that a caller may meet."""
    rows = ["| error | exit code of a command | when |", "| --- | --- | --- |"]
    for name, found in vars(errors).items():
        if name in _PUBLIC:
            first = (inspect.getdoc(found) or "").split("\n\n")[0]
            rows.append(f"| `{name}` | {int(found.exit_code)} | {_inline(' '.join(first.split()))} |")
    about = "Each is a `RankmillError`, with a message of one line: `from rankmill import RunTimeout`."
    return f"\n## Errors\n\n{about}\n\n" + "\n".join(rows) + "\n"
