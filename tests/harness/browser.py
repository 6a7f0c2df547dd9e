"""A real browser."""

from __future__ import annotations

import json
import os
import subprocess
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from tests.harness.processes import wait_for
from tests.harness.tools import tool

_OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu")


def shown(url: str, directory: Path, seconds: int = 8) -> str:
    """A page as a browser has it after some seconds, by its own clock."""
    options = [*_OPTIONS, f"--user-data-dir={directory}", "--dump-dom"]
    done = subprocess.run(
        [tool("chromium", "chromium"), *options, f"--virtual-time-budget={seconds}000", url],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout


class Browser:
    """A browser with one page, driven over a pipe (Chrome DevTools protocol)."""

    def __init__(self, commands: IO[bytes], replies: IO[bytes]) -> None:
        self._commands, self._replies, self._last = commands, replies, 0
        self._session: str | None = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Give a command, and return its result."""
        self._last += 1
        command = {"id": self._last, "method": method, "params": parameters}
        if self._session:
            command["sessionId"] = self._session
        self._commands.write(json.dumps(command).encode() + b"\0")
        self._commands.flush()
        while (reply := self._reply()).get("id") != self._last:
            pass  # an event
        assert "result" in reply, reply
        result: dict[str, Any] = reply["result"]
        return result

    def open(self, url: str) -> None:
        """Go to a page."""
        self.send("Page.navigate", url=url)
        wait_for(lambda: self.run("document.readyState === 'complete' && location.href !== 'about:blank'"))

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression in the page, awaited if it is a promise."""
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, script: str) -> None:
        """Wait until a JavaScript expression is true."""
        wait_for(lambda: self.run(f"Boolean({script})"))

    def click(self, selector: str) -> None:
        """Click on the first element that a CSS selector finds, once it is seen, as a mouse does."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.wait(f"{found}?.checkVisibility()")
        x, y = self.run(
            f"{found}.scrollIntoView({{block: 'center'}}), (({{x, y, width, height}}) => "
            f"[x + width / 2, y + height / 2])({found}.getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Type a text where the focus is."""
        self.send("Input.insertText", text=text)

    def photograph(self, path: Path) -> None:
        """Write a PNG of the whole page."""
        found = self.send("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(b64decode(found["data"]))

    def _reply(self) -> dict[str, Any]:
        raw = bytearray()
        while (byte := self._replies.read(1)) != b"\0":
            assert byte, "the browser has ended"
            raw += byte
        found: dict[str, Any] = json.loads(raw)
        return found


@contextmanager
def browser(directory: Path) -> Iterator[Browser]:
    """A browser; its profile is in `directory`."""
    theirs, commands = os.pipe()
    replies, own = os.pipe()
    words = [tool("chromium", "chromium"), *_OPTIONS, f"--user-data-dir={directory}", "--hide-scrollbars"]
    process = subprocess.Popen(
        ["bash", "-c", f'exec "$@" 3<&{theirs} 4>&{own}', "bash", *words, "--remote-debugging-pipe"],
        pass_fds=(theirs, own), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(theirs)
    os.close(own)
    try:
        with os.fdopen(commands, "wb") as write, os.fdopen(replies, "rb") as read:
            yield Browser(write, read)
    finally:
        process.terminate()
        process.wait(timeout=60)
