"""The blocks of code in the documents: which of them run, and what they print.

A block of ``sh``, ``console`` or ``python`` runs, and a block of ``text`` after it is what it prints, unless
a comment before it says why not, or which test runs it, or tests what it shows:

    <!-- not run: it needs a GPU -->
    <!-- run by tests/extensions/registry/test_registry.py -->
    <!-- tested in tests/producer/files/test_stores.py -->
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GENERATED = {"commands.md", "python.md"}
"""Pages of docs/reference/ whose blocks are signatures and usages."""

_BLOCK = re.compile(r"^(?:<!-- ((?:(?!-->).)*) -->\n)?```(\w*)\n(.*?)^```$", re.M | re.S)
_CODE = {"sh", "console", "python"}


@dataclass(frozen=True)
class Block:
    """A block, and what a comment before it says."""

    kind: str
    text: str
    comment: str
    line: int

    @property
    def runs(self) -> bool:
        """Whether it is code that runs as it is."""
        return self.kind in _CODE and not self.comment

    @property
    def commands(self) -> str:
        """The commands of a console, or the text."""
        if self.kind != "console":
            return self.text
        return "".join(line[2:] + "\n" for line in self.text.splitlines() if line.startswith("$ "))

    @property
    def printed(self) -> list[str]:
        """The lines of a console that are not commands."""
        return [line for line in self.text.splitlines() if not line.startswith("$ ")]


def blocks(path: Path) -> list[Block]:
    """The blocks of a document, in order."""
    text = path.read_text()
    return [
        Block(kind, body, comment or "", text.count("\n", 0, found.start()) + 1)
        for found in _BLOCK.finditer(text)
        for comment, kind, body in [found.groups()]
    ]


def pages() -> list[Path]:
    """The documents whose blocks a reader may run."""
    written = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    tables = {ROOT / "docs" / "benchmarks", ROOT / "docs" / "experiments"}
    return [
        path
        for path in written
        if path.name not in GENERATED | {"report.md"} and not tables & {*path.parents}
    ]


_VARIES = re.compile(
    r"(?:openvino|torch|onnx|mlx), \w+, \w+(?: weights)?(?:, proven to [\d.e-]+)?"  # what auto means here
    r"|[\d.,]+ (?:s|pairs/s)\b|[\d.]+%|\d+ retries"
)
_DECIMAL = re.compile(r"-?\d+\.\d+")
_CLOSE = 0.2
"""How far a score may be from the one in a document, which may have been made in another precision."""


def same(shown: list[str], printed: list[str]) -> bool:
    """Whether a document shows what was printed; ``…`` in it is any text, and alone in a line any lines."""
    if not shown:
        return not printed
    if shown[0].strip() == "…":
        return any(same(shown[1:], printed[start:]) for start in range(len(printed) + 1))
    return bool(printed) and _same_line(shown[0], printed[0]) and same(shown[1:], printed[1:])


def _same_line(shown: str, printed: str) -> bool:
    shown, printed = (_VARIES.sub("~", line.rstrip()) for line in (shown, printed))
    numbers = [float(number) for number in _DECIMAL.findall(shown)]
    words = ".*".join(map(re.escape, _DECIMAL.sub("@@", shown).split("…"))).replace("@@", r"(-?\d+\.\d+)")
    found = re.fullmatch(words, printed)
    return found is not None and all(
        abs(float(one) - other) <= _CLOSE for one, other in zip(found.groups(), numbers, strict=True)
    )
