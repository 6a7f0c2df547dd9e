"""The documents: links lead somewhere, and what is made from code or records is what would be made now."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.figures import FOLDER as FIGURES
from docs.figures import PICTURES
from docs.figures.architecture import ROOMS
from tests.harness import reference
from tests.harness.documents import blocks, same
from tests.project.test_imports import DIRECTION
from tests.project.test_rooms import ROOT

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```$", re.M | re.S)


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub and MyST make them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", _FENCE.sub("", path.read_text()), re.M):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        number = 1
        while slug in found:
            slug, number = f"{slug.removesuffix(f'-{number - 1}')}-{number}", number + 1
        found.add(slug)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    document = ROOT / name
    broken = []
    for link in _LINK.findall(_FENCE.sub("", document.read_text())):
        if re.match(r"\w+:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (document.parent / target).resolve() if target else document
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("name", sorted(reference.PAGES))
def test_the_reference_is_what_the_code_says(name: str) -> None:
    text = (reference.FOLDER / name).read_text()
    assert reference.written(name) == text, "python -m tests.harness.reference writes it anew"


def test_the_reference_has_all_commands_metrics_and_settings() -> None:
    text = {name: (reference.FOLDER / name).read_text() for name in reference.PAGES}
    assert text["commands.md"].count("\n## ") > 35
    assert text["metrics.md"].count("\n| `rankmill_") > 35
    assert text["settings.md"].count("\n| `") > 60
    for code in (0, 1, 2, 3, 130):
        assert f"\n| {code} |" in text["commands.md"].partition("\n## rankmill submit")[0]


@pytest.mark.parametrize("name", sorted(PICTURES))
def test_pictures_are_drawn_from_what_is_recorded(name: str) -> None:
    assert PICTURES[name]() == (FIGURES / name).read_text(), "python -m docs.figures draws it anew"


def test_the_recorded_terminal_shows_what_score_file_prints_now() -> None:
    """The README's block runs in a test, so its lines are those of today; the recording has them as well."""
    frames = json.loads((FIGURES / "terminal.json").read_text())["frames"]
    screen = ["".join(text for text, _ in line) for line in frames[-1]["lines"]]
    block = next(block for block in blocks(ROOT / "README.md") if block.kind == "console")
    missing = [
        line for line in block.printed if line != "…" and not any(same([line], [row]) for row in screen)
    ]
    assert missing == [], "python -m docs.figures.record_terminal records it anew"


def test_the_picture_of_the_rooms_has_their_parts_in_order() -> None:
    assert {room: list(parts) for room, (_, _, parts) in ROOMS.items()} == DIRECTION


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_documents_are_short() -> None:
    """Words of README, CHANGELOG and pages written by hand, without code, links' targets and table bars."""
    made = {"reference", "benchmarks", "experiments"}
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    text = "".join(page.read_text() for page in pages if made.isdisjoint(page.relative_to(ROOT).parts))
    prose = re.sub(r"<!--.*?-->|\]\([^)]*\)", "", _FENCE.sub("", text), flags=re.S)
    assert len([word for word in prose.split() if re.search(r"\w", word)]) <= 26_000


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_needs_no_network(tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--builder", "html"]
    done = subprocess.run(
        [*command, "--doctree-dir", tmp_path / "trees", ROOT / "docs", site],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 25
    loaded = re.compile(r"""<(?:script|img|link|iframe)\b[^>]*(?:src|href)=["'](?:https?:)?//[^"']+""")
    for path in [*pages, *site.rglob("*.css")]:
        text = path.read_text()
        assert loaded.findall(text) == [], path
        assert re.findall(r"""(?:url\(|@import)\s*["']?(?:https?:)?//""", text) == [], path
