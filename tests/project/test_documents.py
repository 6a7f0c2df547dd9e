"""The documents: links lead somewhere, and what is made from code or records is what would be made now."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from docs.figures import FOLDER as FIGURES
from docs.figures import PICTURES
from docs.figures.architecture import ROOMS
from tests.harness import reference
from tests.harness.browser import shown
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


def by_hand() -> list[Path]:
    """README, CHANGELOG and the pages that nothing makes."""
    made = {"reference", "benchmarks", "experiments"}
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    return [page for page in pages if made.isdisjoint(page.relative_to(ROOT).parts)]


def test_the_documents_are_short() -> None:
    """Words without code, links' targets and table bars."""
    text = "".join(page.read_text() for page in by_hand())
    prose = re.sub(r"<!--.*?-->|\]\([^)]*\)", "", _FENCE.sub("", text), flags=re.S)
    assert len([word for word in prose.split() if re.search(r"\w", word)]) <= 26_000


def test_no_line_of_a_sentence_begins_like_a_numbered_list() -> None:
    """Markdown takes "1. If" at the start of a line for a list, though it ends "exit code 1"."""
    broken = re.compile(r"^[^\s\d#|<-].*\n\d+[.)] .*", re.M)
    assert [found for page in by_hand() for found in broken.findall(_FENCE.sub("", page.read_text()))] == []


def test_the_documents_are_easy_to_read() -> None:
    """Flesch and Kincaid's grade, which counts the words of a sentence and the syllables of a word."""
    assert {page.name: grade for page in by_hand() if (grade := reading_grade(page.read_text())) > 9} == {}


def reading_grade(text: str) -> float:
    """School years that a reader needs; code, tables, headings and links' targets are left out."""
    text = re.sub(r"<!--.*?-->|^[|#].*?$|!?\]\([^)]*\)", "", _FENCE.sub("\n\n", text), flags=re.S | re.M)
    text = re.sub(r"`[^`]*`", "code", text)
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:- |\d+\. ))", text)
    parts = [part for block in blocks for part in re.split(r"(?<=[.!?])\s", re.sub(r"^\s*\d+\. ", "", block))]
    sentences = [words for part in parts if (words := re.findall(r"[a-z']*[a-z]", part.lower()))]
    words = [word for sentence in sentences for word in sentence]
    syllables = sum(max(len(re.findall(r"[aeiouy]+", re.sub(r"(?<!l)e$", "", word))), 1) for word in words)
    return 0.39 * len(words) / len(sentences) + 11.8 * syllables / len(words) - 15.59


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
    assert first_hits(site, tmp_path) == QUESTIONS


_ASKED = {
    "start": ["install"],
    "guides/score-files": ["resume", "interrupted run", "truncation"],
    "guides/large-files": ["s3"],
    "guides/mine-negatives": ["mine negatives"],
    "guides/rerank-a-run": ["bm25 run"],
    "guides/filter-a-corpus": ["threshold filter"],
    "guides/texts-and-conversations": ["reward model"],
    "guides/python": ["asyncio"],
    "guides/serve": ["gateway keys", "rate limit"],
    "guides/migrate": ["cohere"],
    "guides/batches": ["batch api openai"],
    "guides/cluster": ["worker dies", "redis memory", "chunk size", "priority"],
    "guides/gpu-host": ["gpu"],
    "guides/submitted-runs": ["webhook"],
    "guides/orchestrators": ["airflow"],
    "guides/models": ["model registry"],
    "guides/tune": ["tune"],
    "operations/deploy": ["kubernetes", "sentinel"],
    "operations/runbook": ["alerts"],
    "operations/upkeep": ["upgrade"],
    "reference/commands": ["exit codes"],
    "reference/settings": ["settings environment variable"],
    "reference/metrics": ["prometheus metrics"],
    "explanation/backends": ["precision", "int8"],
    "explanation/benchmarks": ["speed benchmark"],
}
QUESTIONS = {words: page for page, asked in _ASKED.items() for words in asked}
"""What users look for, and the page that the site's search must show first."""

_ASK = """
<!doctype html><pre></pre><script>
(async () => {
  for (const words of WORDS) {
    const frame = document.createElement("iframe");
    frame.src = "search.html?q=" + encodeURIComponent(words);
    document.body.append(frame);
    let link = null;
    while (!link) {
      await new Promise((go) => setTimeout(go, 50));
      link = frame.contentDocument?.querySelector("#search-results li a");
    }
    document.querySelector("pre").textContent += link.getAttribute("href") + "\\n";
    frame.remove();
  }
})();
</script>
"""


def first_hits(site: Path, tmp_path: Path) -> dict[str, str]:
    """The page that the site's search shows first for each of `QUESTIONS`, in a browser."""
    (site / "ask.html").write_text(_ASK.replace("WORDS", json.dumps(list(QUESTIONS))))
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=site)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        page = shown(f"http://127.0.0.1:{server.server_port}/ask.html", tmp_path / "browser", seconds=300)
        server.shutdown()
    found = re.search(r"<pre>(.*?)</pre>", page, re.S)
    links = html.unescape(found[1]).split() if found else []
    return {words: re.sub(r"\.html.*", "", link) for words, link in zip(QUESTIONS, links, strict=False)}
