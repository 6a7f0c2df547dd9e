"""terminal.svg: a recorded session as an animated SVG, which plays in an ``<img>`` without a script."""

from __future__ import annotations

from html import escape
from typing import Any

from docs.figures.svg import MONO

_CHAR, _LINE, _MARGIN, _BAR = 8.4, 20.0, 16.0, 34.0
_COLOURS = {
    "default": "#e6edf3", "black": "#484f58", "red": "#ff7b72", "green": "#3fb950", "brown": "#d29922",
    "blue": "#58a6ff", "magenta": "#bc8cff", "cyan": "#39c5cf", "white": "#b1bac4", "brightblack": "#6e7681",
    "brightred": "#ffa198", "brightgreen": "#56d364", "brightbrown": "#e3b341", "brightblue": "#79c0ff",
    "brightmagenta": "#d2a8ff", "brightcyan": "#56d4dd", "brightwhite": "#ffffff",
}  # fmt: skip


def animated(recorded: dict[str, Any]) -> str:
    """The session: ``size`` (columns, lines) and ``frames``, each its seconds and lines of (text, colour)."""
    columns, lines = recorded["size"]
    frames = recorded["frames"]
    width, height = 2 * _MARGIN + columns * _CHAR, _BAR + _MARGIN + lines * _LINE
    total = sum(frame["seconds"] for frame in frames)
    rows: dict[str, int] = {}
    film, steps, passed = [], [], 0.0
    for number, frame in enumerate(frames):
        uses = []
        for place, spans in enumerate(frame["lines"]):
            if spans:
                row = rows.setdefault(_row(spans), len(rows))
                uses.append(f'<use href="#r{row}" y="{place * _LINE:g}"/>')
        film.append(f'<svg y="{number * height:g}">{"".join(uses)}</svg>')
        steps.append(f"{100 * passed / total:.3f}% {{ transform: translateY({-number * height:g}px) }}")
        passed += frame["seconds"]
    last = -(len(frames) - 1) * height
    symbols = "".join(f'<g id="r{number}">{row}</g>' for row, number in rows.items())
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" role="img" \
aria-label="A terminal: score-file scores, is interrupted, and goes on">
<style>
text {{ font-family: {MONO}; font-size: 14px; white-space: pre; }}
.film {{ animation: film {total:.2f}s steps(1, end) infinite; }}
@keyframes film {{ {" ".join(steps)} 100% {{ transform: translateY({last:g}px) }} }}
@media (prefers-reduced-motion: reduce) {{ .film {{ animation: none; transform: translateY({last:g}px); }} }}
</style>
<defs>{symbols}</defs>
<rect width="{width:g}" height="{height:g}" rx="10" fill="#0d1117" stroke="#30363d"/>
<circle cx="20" cy="18" r="6" fill="#ff5f57"/><circle cx="40" cy="18" r="6" fill="#febc2e"/>
<circle cx="60" cy="18" r="6" fill="#28c840"/>
<svg x="{_MARGIN:g}" y="{_BAR:g}" width="{columns * _CHAR:g}" height="{height - _BAR:g}">
<g class="film">
{chr(10).join(film)}
</g>
</svg>
</svg>
"""


def _row(spans: list[tuple[str, str]]) -> str:
    shown, place = [], 0
    for text, colour in spans:
        if text.strip():
            length = f'textLength="{len(text) * _CHAR:g}"'
            shown.append(
                f'<text x="{place * _CHAR:g}" y="15" {length} fill="{_COLOURS.get(colour, f"#{colour}")}">{escape(text)}</text>'
            )
        place += len(text)
    return "".join(shown)
