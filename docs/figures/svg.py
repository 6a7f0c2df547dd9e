"""The little SVG that the pictures need: a card that is legible on a light and on a dark page.

A picture follows the system's light or dark mode by itself, also as an ``<img>``.
"""

from __future__ import annotations

from html import escape

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"

_STYLE = f"""
:root {{ --card: #ffffff; --edge: #d0d7de; --text: #1f2328; --soft: #59636e; --grid: #e4e8ec; --box: #f6f8fa;
  --a: #1f6feb; --b: #bf5f00; --c: #1a7f37; --d: #8250df; --bad: #cf222e; --pad: #c8d1da; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --card: #0d1117; --edge: #30363d; --text: #e6edf3; --soft: #9198a1; --grid: #21262d; --box: #161b22;
    --a: #58a6ff; --b: #f0883e; --c: #3fb950; --d: #bc8cff; --bad: #ff7b72; --pad: #3d444d; }}
}}
text {{ font-family: {FONT}; font-size: 13px; fill: var(--text); }}
.soft {{ fill: var(--soft); font-size: 12px; }} .title {{ font-size: 15px; font-weight: 600; }}
.mono {{ font-family: {MONO}; font-size: 12px; white-space: pre; }} .bold {{ font-weight: 600; }}
"""


class Picture:
    """Shapes on a card of a width and a height in pixels; colours are names of `_STYLE`."""

    def __init__(self, width: float, height: float, title: str, note: str = "") -> None:
        self._size = width, height
        self._title = title
        self._shapes: list[str] = []
        self.text(20, 28, title, "title")
        for number, line in enumerate(note.splitlines()):
            self.text(20, 48 + 16 * number, line, "soft")

    def text(
        self, x: float, y: float, text: str, kind: str = "", *, anchor: str = "start", fill: str = ""
    ) -> None:
        """A line of text; `kind` is ``soft``, ``title``, ``mono`` or ``bold``."""
        style = f' style="fill: var(--{fill})"' if fill else ""
        name = f' class="{kind}"' if kind else ""
        place = f'x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}"'
        self._shapes.append(f"<text {place}{name}{style}>{escape(text)}</text>")

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, *, edge: str = "", radius: float = 0
    ) -> None:
        """A rectangle."""
        stroke = f" stroke: var(--{edge})" if edge else ""
        stroke += "" if radius or edge else " shape-rendering: crispEdges"
        self._shapes.append(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" rx="{_n(radius)}"'
            f' style="fill: var(--{fill});{stroke}"/>'
        )

    def line(
        self,
        points: list[tuple[float, float]],
        colour: str,
        *,
        width: float = 1,
        dash: str = "",
        arrow: bool = False,
        back: bool = False,
    ) -> None:
        """Straight lines from point to point, with an arrow at the end, and one `back` at the beginning."""
        path = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        more = f" stroke-dasharray: {dash};" if dash else ""
        end = ' marker-end="url(#arrow)"' if arrow else ""
        end += ' marker-start="url(#arrow)"' if back else ""
        self._shapes.append(
            f'<polyline points="{path}" style="fill: none; stroke: var(--{colour}); stroke-width: {_n(width)};'
            f'{more}"{end}/>'
        )

    def dot(self, x: float, y: float, radius: float, fill: str) -> None:
        """A circle."""
        self._shapes.append(
            f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}" style="fill: var(--{fill})"/>'
        )

    def __str__(self) -> str:
        width, height = self._size
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(width)} {_n(height)}"'
                f' width="{_n(width)}" height="{_n(height)}" role="img" aria-label="{escape(self._title)}">',
                f"<style>{_STYLE}</style>",
                '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8"'
                ' orient="auto-start-reverse"><path d="M0,0 L8,4 L0,8 z" style="fill: var(--soft)"/></marker></defs>',
                f'<rect x="0.5" y="0.5" width="{_n(width - 1)}" height="{_n(height - 1)}" rx="10"'
                ' style="fill: var(--card); stroke: var(--edge)"/>',
                *self._shapes,
                "</svg>\n",
            ]
        )


def _n(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")
