"""configs/prometheus/consoles/runbook.html: docs/operations/runbook.md, for links from alerts."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt

_SOURCE = Path(__file__).resolve().parents[3] / "docs" / "operations" / "runbook.md"
_TO_OTHER_PAGES = re.compile(r"\[([^\]]*)\]\((?!#)[^)]*\)")
_HEAD = """<!doctype html>
<meta charset="utf-8">
<meta name="generator" content="python -m tests.harness.reference, from docs/operations/runbook.md">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<title>Runbook of rankmill</title>
<style>
body { max-width: 50rem; margin: 2rem auto; padding: 0 1rem; font: 16px/1.5 system-ui, sans-serif }
td, th { padding: .3rem .6rem; text-align: left; vertical-align: top; border-top: 1px solid #8888 }
:target { background: #fc08 }
</style>
"""


def page() -> str:
    """The page; its links to other documents are texts, because Prometheus does not have those."""
    markdown = MarkdownIt().enable("table")
    tokens = markdown.parse(_TO_OTHER_PAGES.sub(r"\1", _SOURCE.read_text()))
    for opening, inline in pairwise(tokens):
        if opening.type == "heading_open":
            opening.attrSet("id", re.sub(r"[^\w\- ]", "", inline.content.lower()).replace(" ", "-"))
    return f"{_HEAD}{markdown.renderer.render(tokens, markdown.options, {})}"
