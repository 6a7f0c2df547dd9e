"""docs/reference/settings.md: each setting with its values, default and meaning."""

from __future__ import annotations

import re

from rankmill.cli.config import config_schema
from rankmill.jobs.runtime.settings import BASE

_INTRO = """\
# Settings

A setting comes from the first of these that names it:

1. the option of a command ([commands](commands.md)),
2. the environment: `RANKMILL_` and the name in capitals, such as `RANKMILL_PRECISION=fp32`; `null` is
   that of a file, and an empty variable counts as not set; also `REDIS_URL`,
3. a config file: `--config FILE`, or `RANKMILL_CONFIG`,
4. [configs/base.yaml](../../configs/base.yaml), which has every default.

A key or a `RANKMILL_` variable that names no setting is an error. A config file may extend another one in its
folder with `extends: other.yaml`. `rankmill config show --config cuda` prints every setting and its source.
`rankmill config schema` prints a schema for editors.

`--config` also takes the name of a config file that rankmill ships:

"""

_MADE = "\nThis page is made from the code (`python -m tests.harness.reference`).\n"


def page() -> str:
    """The page."""
    kinds = config_schema()["properties"]
    parts = [_INTRO, _shipped(), _MADE]
    for line in BASE.read_text().splitlines():
        if found := re.match(r"(\w+): *(.*?) *(?:# (.*))?$", line):
            name, default, meaning = found[1], found[2], found[3] or "name of the queue"
            cells = (f"`{name}`", f"`{default}`", _kind(kinds[name]), meaning)
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
        elif section := re.match(r"# ([A-Z][^.:]*)$", line):
            parts.append(f"\n## {section[1]}\n\n| setting | default | value | meaning |\n")
            parts.append("| --- | --- | --- | --- |\n")
    return "".join(parts)


def _shipped() -> str:
    rows = ["| name | what for |", "| --- | --- |"]
    for path in sorted(BASE.parent.glob("*.yaml")):
        if path != BASE:
            comment = re.findall(r"^# (?!yaml-language)(.*)", path.read_text(), re.M)
            rows.append(f"| `{path.stem}` | {' '.join(comment)} |")
    return "\n".join(rows) + "\n"


def _kind(schema: dict[str, object]) -> str:
    """The values of a setting, in words."""
    options = schema.get("anyOf")
    if isinstance(options, list):
        return " or ".join(dict.fromkeys(_kind(each) for each in options))
    if "const" in schema:
        return f"`{schema['const']}`"
    if isinstance(words := schema.get("enum"), list):
        return ", ".join(f"`{word}`" for word in words)
    return _NAMES.get(str(schema.get("type")), str(schema.get("type")))


_NAMES = {
    "string": "text",
    "null": "`null`",
    "integer": "whole number",
    "number": "number",
    "boolean": "`true`, `false`",
    "array": "list",
}
