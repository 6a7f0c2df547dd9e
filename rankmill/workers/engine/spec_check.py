"""Compares tokens with those from transformers, if a spec has options that change tokens.

The scores of a model are compared when the model is loaded (`proving`). This module compares only token ids,
and only when a spec first comes to this host.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rankmill.jobs.cache import read_json, strangers
from rankmill.jobs.contract.errors import SpecError
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.workers.engine.probing import ids_of
from rankmill.workers.engine.work import prepare
from rankmill.workers.host.disk_cache import digest, try_to_keep, version
from rankmill.workers.models.description import load_tokenizer
from rankmill.workers.models.loading import ANY_LENGTH, Loaded, Model, find_max_length
from rankmill.workers.models.probes import LONGEST, OF_SPECS, Probe, columns_of, over_the_limit
from rankmill.workers.models.reference_tokens import ReferenceTokens

_KEPT = 1000
"""For each model, a host remembers at most this many specs whose tokens were compared and are right. The
oldest are forgotten.
"""

_OTHERS = {"model", "revision", "precision", "activation", "label", "all_labels", "deterministic"}
"""Fields of a spec that need no comparison here. Most change no tokens. For ``model`` and ``revision``,
tokens were compared when the model was loaded.
"""


class SpecCheck:
    """Compares a model's tokens with those from transformers, once for each set of options that change
    tokens.

    Parameters
    ----------
    loaded, template
        The model, and the prompt template with which its scores were compared.
    folder
        Folder in which this host keeps the specs that it has compared.
    """

    def __init__(self, loaded: Loaded, template: str | None, folder: Path) -> None:
        self._loaded, self._template, self._folder = loaded, template, folder
        self._about = {
            "model": loaded.revision,
            "copy": loaded.about.copy,
            "versions": [version(name) for name in ("rankmill", "transformers", "tokenizers")],
            "probes": digest(OF_SPECS),
        }
        self._file = folder / f"specs-{digest(sorted(self._about.items()))}.json"
        self._right: set[str] = set()
        self._tokenizer: Any = None

    def __call__(self, spec: ScoreSpec, model: Model) -> None:
        """Compare the tokens of probes (sample pairs) with transformers', with the options of a spec.

        Does nothing if the spec asks for tokens, or if tokens with the same options were compared before on
        this host.

        Raises
        ------
        SpecError
            The tokens differ from transformers'. The error is not a `WorkerError`, which would refuse all
            runs of the model, because this host may well score runs with other options.
        """
        options = spec.model_dump(exclude=_OTHERS, exclude_defaults=True)
        adds = options.keys() - {"inputs", "prompt_template"}
        if not adds and spec.prompt_template == self._template:
            return
        if spec.inputs == "tokens":
            return
        name = digest(sorted(options.items()))
        if name in self._right or name in (compared := self._known()):
            return
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._loaded.source, self._loaded.revision)
        side = self._tokenizer.truncation_side
        try:
            self._compare(spec, model)
        finally:
            self._tokenizer.truncation_side = side
        self._right.add(name)
        if self._loaded.revision:
            specs = [*compared, name][-_KEPT:]
            try_to_keep(self._file, {**self._about, "specs": specs}, f"what is known of {spec.model}")

    def _known(self) -> list[str]:
        if strangers(self._folder, self._folder.parent):
            return []
        kept = read_json(self._file)
        specs = kept.pop("specs", [])
        return specs if kept == self._about and isinstance(specs, list) else []

    def _compare(self, spec: ScoreSpec, model: Model) -> None:
        limit = find_max_length(spec, self._loaded.about)
        theirs = ReferenceTokens(spec, replace(self._loaded.about, tokenizer=self._tokenizer))
        # if a model's own limit is long, texts over it were compared when the model was loaded
        cut = spec.max_length is not None or limit <= LONGEST
        probes = [*OF_SPECS, *(over_the_limit(limit) if cut else ())]
        work = prepare(model, *columns_of(probes, spec.inputs))
        ours = list(zip(work.rows.tolist(), ids_of(work.tokens), strict=True))
        for row, probe in enumerate(probes):
            mine = [ids for place, ids in ours if place == row]
            whole = theirs(probe, ANY_LENGTH)["input_ids"]
            if model.refused_over is not None and len(whole) > limit:
                expected = []
            elif count := self._windows_of(spec, probe, theirs, limit):
                parts = [*self._windows(probe, model)]
                compared = parts if len(parts) == count else []
                expected = [theirs(part, limit)["input_ids"] for part in compared]
            else:
                expected = [row_ids for row_ids in (theirs(probe, limit)["input_ids"],) if row_ids]
            if mine != expected:
                options = ", ".join(sorted(spec.model_dump(exclude=_OTHERS, exclude_defaults=True)))
                raise SpecError(
                    f"model {spec.model} would not get its own tokens with the options of this run "
                    f"({options}): probe {row} gets others than from transformers"
                )

    def _windows_of(self, spec: ScoreSpec, probe: Probe, theirs: ReferenceTokens, limit: int) -> int:
        """Return the number of windows into which a probe's passage must be cut; 0 if it stays whole."""
        if not spec.long.startswith("split"):
            return 0
        passage = theirs.beginning(probe.passage)
        without = probe._replace(passage="") if spec.inputs == "pairs" else Probe("", "")
        room = limit - len(theirs(without, ANY_LENGTH)["input_ids"])
        tokens = len(self._tokenizer(passage, add_special_tokens=False)["input_ids"])
        if not tokens > room >= limit // 4:
            return 0
        return 1 + len(range(0, tokens - room, min(spec.long_stride or max(room // 2, 1), room)))

    def _windows(self, probe: Probe, model: Model) -> Iterator[Probe]:
        """Yield each window into which the worker cuts a probe's passage, as a probe of its own.

        If the windows leave out text, yield an empty probe too, so that the comparison fails.
        """
        if model.windows is None:
            return
        columns = [[text or "" for text in column] for column in columns_of([probe], model.inputs)]
        if model.short_passages:
            columns[-1] = model.short_passages.cut(columns[-1])
        _, queries, read = model.windows.cut(columns[0], columns[1] if len(columns) > 1 else None)
        parts, (text,) = read if read is not None else queries, columns[-1]
        done = 0
        for part in parts:
            # the passage may contain this window's text several times: take the last place that leaves no gap
            at = text.rfind(part, 0, done + len(part) + 1)
            if at < 0 or text[done:at].strip():
                break
            done = max(done, at + len(part))
            yield probe._replace(passage=part)
        if text[done:].strip():
            yield Probe("", "")
