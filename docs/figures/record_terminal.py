"""Record terminal.json: score-file in a real terminal, interrupted with Ctrl-C, and continued.

python -m docs.figures.record_terminal
"""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyte

HERE = Path(__file__).resolve().parent
COLUMNS, LINES = 98, 16
COMMAND = "score-file examples/pairs.jsonl --model demo --top-k 3 -o best.jsonl"
SHOW = "wc -l best.jsonl"
PAUSE, LAST = 1.0, 4.0
_KEY, _FRAME = 0.04, 0.12


class Recording:
    """A screen, and what was on it for how long."""

    def __init__(self) -> None:
        self._screen = pyte.Screen(COLUMNS, LINES)
        self._stream = pyte.Stream(self._screen)
        self._frames: list[dict[str, Any]] = []

    def show(self, text: str, seconds: float) -> None:
        """Feed what a program has written, and keep what is to be seen then."""
        self._stream.feed(text)
        lines = [self._line(number) for number in range(LINES)]
        if self._frames and self._frames[-1]["lines"] == lines:
            self._frames[-1]["seconds"] += seconds
        else:
            self._frames.append({"seconds": seconds, "lines": lines})

    def type(self, command: str) -> None:
        """A person types a command."""
        self.show("\x1b[32m$\x1b[0m ", PAUSE)
        for key in command:
            self.show(key, _KEY)
        self.show("\r\n", _FRAME)

    def run(self, command: str, folder: str, interrupt: str | None = None) -> None:
        """Run it in a terminal; send Ctrl-C when it has written something that matches `interrupt`."""
        child, master = pty.fork()
        if not child:
            os.chdir(folder)
            os.execve(
                "/bin/sh", ["sh", "-c", f"stty cols {COLUMNS} rows {LINES}; exec {command}"], _environ()
            )
        written, begun = "", time.monotonic()
        try:
            while True:
                ready, _, _ = select.select([master], [], [], _FRAME)
                text = os.read(master, 65536).decode(errors="replace") if ready else ""
                if ready and not text:
                    break
                now = time.monotonic()
                self.show(text, now - begun)
                written, begun = written + text, now
                if interrupt and re.search(interrupt, written):
                    os.write(master, b"\x03")
                    interrupt = None
        except OSError:  # the terminal has closed
            pass
        os.waitpid(child, 0)

    def written(self) -> dict[str, Any]:
        """The recording."""
        self._frames[-1]["seconds"] = LAST
        frames = [{**frame, "seconds": round(frame["seconds"], 2)} for frame in self._frames]
        return {"size": [COLUMNS, LINES], "frames": frames}

    def _line(self, number: int) -> list[tuple[str, str]]:
        spans: list[tuple[str, str]] = []
        cells = self._screen.buffer[number]
        text = [cells[column] for column in range(COLUMNS)]
        while text and text[-1].data == " ":
            text.pop()
        for cell in text:
            if spans and spans[-1][1] == cell.fg:
                spans[-1] = (spans[-1][0] + cell.data, cell.fg)
            else:
                spans.append((cell.data, cell.fg))
        return spans


def _environ() -> dict[str, str]:
    bin_folder = str(Path(sys.executable).parent)
    path = f"{bin_folder}:{os.environ['PATH']}"
    return {**os.environ, "TERM": "xterm-256color", "PATH": path}


def main() -> None:
    """Write the recording."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(HERE.parents[1] / "examples", Path(folder, "examples"))
        recording = Recording()
        recording.type(COMMAND)
        recording.run(COMMAND, folder, interrupt=r"([3-9]|1[0-9])[0-9] of 250 pairs")
        recording.type(COMMAND)
        recording.run(COMMAND, folder)
        recording.type(SHOW)
        recording.run(SHOW, folder)
    (HERE / "terminal.json").write_text(json.dumps(recording.written(), ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
