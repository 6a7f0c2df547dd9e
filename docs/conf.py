"""The site: ``make docs``. Pages are plain Markdown; their order is that of the links in README.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "rankmill"
html_title = "rankmill"
author = "the rankmill developers"
project_copyright = ""
extensions = ["myst_parser"]
root_doc = "README"
exclude_patterns = ["figures", "images"]
myst_heading_anchors = 4
smartquotes = False
suppress_warnings = ["misc.highlighting_failure"]  # examples leave things out with …
html_theme = "furo"
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_additional_pages = {"index": "index.html"}
templates_path = ["site"]
html_static_path = ["site/static"]
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).parent / "site" / "scorer.js")
html_theme_options = {"source_view_link": "", "top_of_page_buttons": []}

_SECTION = re.compile(r"^## (.+)\n((?:.*\n)*?)(?=^## |\Z)", re.M)
_PAGE = re.compile(r"\]\(([\w/-]+)\.md\)")


def setup(app: Sphinx) -> None:
    """Let README.md be the contents, and pages be pages of a site."""
    app.connect("source-read", _read)


def _read(app: Sphinx, name: str, source: list[str]) -> None:
    """Add what the site needs and a reader of the Markdown does not."""
    text = source[0]
    if name == root_doc:
        text += "".join(map(_toctree, _SECTION.findall(text)))
    elif name.startswith(("benchmarks/", "experiments/")):  # tables that pages link to
        text = f"---\norphan: true\n---\n\n{text}"
    source[0] = re.sub(_outside_of(Path(app.srcdir), name), r"\1", text)


def _toctree(section: tuple[str, str]) -> str:
    title, links = section
    pages = "\n".join(_PAGE.findall(links))
    return f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{pages}\n```\n" if pages else ""


def _outside_of(folder: Path, name: str) -> re.Pattern[str]:
    """Links to what is in the repository and not in docs/: the site has their words alone."""
    depth = name.count("/") + 1
    return re.compile(rf"\[([^\]]+)\]\((?:\.\./){{{depth}}}[^)]*\)")
