"""Lua scripts; each is a file whose first lines say what it does, its keys, its arguments and its reply."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from redis.client import Pipeline
from redis.exceptions import NoScriptError

from rankmill.jobs.contract.home import shipped


class Script:
    """A Lua script, whose file is read at the first use. Threads may share the object.

    Parameters
    ----------
    path
        Path of the script's file in the package's folder.
    uses
        Scripts whose functions this script calls. The texts of these scripts are put in front.
    """

    def __init__(self, path: str, *uses: Script) -> None:
        self.path = path
        self.uses = uses

    @cached_property
    def text(self) -> str:
        own = shipped(*self.path.split("/")).read_text(encoding="utf-8")
        return "".join([*(used.text for used in self.uses), own])

    @cached_property
    def _digest(self) -> str:
        return hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()

    def run(self, client: Any, keys: Sequence[str | bytes], *arguments: Any) -> Any:
        """Run the script and return its reply. If `client` is a pipeline, add the script, and return the
        pipeline.

        A pipeline gets the script's text, not only the digest of the text: the server may not know the
        digest, and within a transaction it would be too late to send the text.
        """
        parameters = (len(keys), *keys, *arguments)
        if isinstance(client, Pipeline):
            return client.eval(self.text, *parameters)
        try:
            return client.evalsha(self._digest, *parameters)
        except NoScriptError:
            return client.eval(self.text, *parameters)
