"""Sums up the statistics of scored chunks, for score-file's summary and the metadata of its output."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import product

from pydantic import TypeAdapter, ValidationError

from rankmill.jobs.contract.errors import InputError
from rankmill.jobs.contract.file_run import RunOutcome
from rankmill.jobs.contract.results import worst
from rankmill.jobs.runtime.settings import Settings
from rankmill.producer.collect.scored import ScoredTable
from rankmill.producer.files.outputs import bound_of
from rankmill.producer.files.sink import ScoredFile, ScoredParts


class Summary(RunOutcome):
    """The result of score-file, as printed with ``--json``.

    Attributes
    ----------
    resumed_rows
        Rows that earlier, interrupted commands have scored.
    seconds
        Time of this command.
    startup_seconds
        Part of ``seconds`` until a worker was seen.
    load_seconds
        Part of ``seconds`` after ``startup_seconds``, until a worker had loaded the model.
    pairs_per_second
        Speed of this command after a worker had loaded the model.
    real_token_share
        Share of the computed tokens that were not padding.
    int8_gain
        Speed of int8 divided by that of the precision used; ``None`` if no worker has measured it.
    windows
        Number of windows that long texts were cut into.
    reused_rows
        Rows that took their score from an earlier output.
    bound
        How far a logit may be from the model's own logit. Workers prove this with test pairs. ``None`` if a
        worker has not proven it.
    reference
        ``own`` if the model was too large to be run in fp32 for comparison. The bound then says how far the
        workers' logits may be from transformers' logits in the worker's precision. Otherwise ``None``.
    deterministic
        Whether the scores are deterministic.
    kind
        Device, versions and precision that decide the bits of deterministic scores.
    taken
        The columns of ids and texts that were read from the queries and the corpus of a run.
    """

    startup_seconds: float
    load_seconds: float
    pairs_per_second: float
    real_token_share: float
    backend: str
    device: str
    int8_gain: float | None
    windows: int
    reused_rows: int
    bound: float | None
    reference: str | None
    deterministic: bool
    kind: str | None
    taken: dict[str, str]


@dataclass
class Tally:
    """Sums of the statistics of a file's chunks.

    Attributes
    ----------
    resumed_rows
        Number of rows that earlier processes have scored.
    how
        Backend, device and precision of the scores; several if workers differ.
    int8_gain
        The smallest speed of int8 divided by that of the precision used; ``None`` if no worker has measured
        it.
    each
        With several models, the sums of each model.
    """

    resumed_rows: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    retries: int = 0
    windows: int = 0
    how: set[tuple[str, str, str]] = field(default_factory=set)
    revisions: set[str] = field(default_factory=set)
    bounds: set[float | None] = field(default_factory=set)
    reference: str | None = None
    kinds: set[str] = field(default_factory=set)
    reused_rows: int = 0
    int8_gain: float | None = None
    each: list[Tally] = field(default_factory=list)

    def written(self) -> str:
        return _TALLY.dump_json(self).decode()

    @staticmethod
    def read(written: str) -> Tally:
        """Read the sums that an earlier process wrote into the journal; raises `InputError` if they are
        damaged.
        """
        try:
            return _TALLY.validate_json(written) if written else Tally()
        except ValidationError:
            raise InputError("the journal's sums are damaged; start over with --restart") from None

    def add(self, part: ScoredTable) -> None:
        """Add a chunk's statistics. With several models, `part.parts` has the scores of each model."""
        for own, other in zip(self.each, part.parts, strict=False):
            own.add(other)
        for each in part.parts or (part,):
            self._count(each)

    def _count(self, part: ScoredTable) -> None:
        stats = part.stats
        self.reused_rows += part.reused
        if stats is None:
            return
        self.tokens += stats.tokens
        self.padded_tokens += stats.padded_tokens
        self.retries += stats.attempt - 1
        self.windows += stats.windows
        self.how.add((stats.backend, stats.device, stats.precision))
        self.revisions.add(stats.revision or "")
        self.bounds.add(stats.bound)
        self.reference = stats.reference or self.reference
        self.kinds |= {stats.kind} if stats.kind else set()
        if stats.int8_gain is not None:
            self.int8_gain = min(stats.int8_gain, self.int8_gain or math.inf)

    def add_reused(self, made: Mapping[str, str]) -> None:
        """Add the backend, device and so on of an earlier output's scores, from the output's metadata
        `made`.
        """
        names = [made.get(f"rankmill.{name}", "").split(", ") for name in ("backend", "device", "precision")]
        self.how |= {(backend, device, precision) for backend, device, precision in product(*names)}
        self.revisions.add(made.get("rankmill.revision", ""))
        self.bounds.add(bound_of(made))
        self.reference = made.get("rankmill.reference", self.reference)
        self.kinds |= {made["rankmill.kind"]} if "rankmill.kind" in made else set()

    def made_with(self) -> dict[str, str]:
        """Return the scores' backend, device and precision, each joined with commas if workers differ."""
        names = ("backend", "device", "precision")
        return {name: ", ".join(sorted({kind[at] for kind in self.how})) for at, name in enumerate(names)}

    @property
    def kind(self) -> str | None:
        return ", ".join(sorted(self.kinds)) or None

    def proven(self) -> dict[str, str]:
        """Return metadata that say how exact the scores are: ``bound``, ``reference`` and ``kind``, as far as
        they are known.
        """
        bound = worst(self.bounds)
        stated = None if bound is None else f"{bound:g}"
        facts = {"bound": stated, "reference": self.reference, "kind": self.kind}
        return {name: value for name, value in facts.items() if value}

    @property
    def revision(self) -> str | None:
        """The model's revision: a commit or a digest of its files, such as ``"1a2b3c"``. Several models have
        ``"1a2b3c, 4d5e6f"``.

        ``None`` if a revision is not known, or no chunk was scored.
        """
        if self.each:
            known = [own.revision or "" for own in self.each]
            return ", ".join(known) if all(known) else None
        return None if "" in self.revisions else ", ".join(sorted(self.revisions)) or None


_TALLY = TypeAdapter(Tally)


def metadata(
    settings: Settings, tally: Tally, models: Sequence[str] = (), columns: Sequence[str] = ()
) -> dict[str, str]:
    """Return the metadata of the output file: release, model, precision and so on.

    For several `models`, ``rankmill.columns`` is a JSON object that says how each of the `columns` was made.
    """
    spec = settings.spec().model_dump(exclude_defaults=True)
    made_with, own = tally.made_with(), {}
    if models:
        columns_made = [
            {
                "model": model,
                "revision": own_tally.revision or "",
                **own_tally.made_with(),
                **own_tally.proven(),
            }
            for model, own_tally in zip(models, tally.each, strict=True)
        ]
        own["rankmill.columns"] = json.dumps(dict(zip(columns, columns_made, strict=True)))
    return {
        "rankmill.version": version("rankmill"),
        **{f"rankmill.{name}": str(value) for name, value in spec.items()},
        "rankmill.model": ", ".join(models or [settings.model]),
        **own,
        "rankmill.revision": tally.revision or settings.revision or "",
        "rankmill.precision": made_with["precision"] or settings.precision,
        "rankmill.backend": made_with["backend"],
        "rankmill.device": made_with["device"],
        "rankmill.max_length": str(settings.max_length or ""),
        "rankmill.activation": settings.activation,
        **{f"rankmill.{name}": value for name, value in tally.proven().items()},
        **({"rankmill.windows": str(tally.windows)} if settings.long.startswith("split") else {}),
    }


def summarize(
    output: ScoredFile | ScoredParts,
    models: Sequence[str],
    before: tuple[float, float],
    tally: Tally,
    seconds: float,
    taken: Mapping[str, str],
) -> Summary:
    """Make the summary of a finished score-file command.

    Parameters
    ----------
    output, models
        The finished output, and the names of the models.
    before
        Seconds until a worker was seen, and from then until a worker had loaded the model.
    tally
        Sums over the chunks.
    seconds
        The time of the whole command.
    taken
        The columns of ids and texts that were read from the queries and the corpus of a run.
    """
    fresh_rows = output.rows - tally.resumed_rows
    return Summary(
        output=str(output.path),
        rows=output.rows,
        resumed_rows=tally.resumed_rows,
        row_errors=output.row_errors,
        errors_file=str(output.errors_path) if output.row_errors else None,
        seconds=round(seconds, 3),
        startup_seconds=round(before[0], 3),
        load_seconds=round(before[1], 3),
        pairs_per_second=round(fresh_rows / max(seconds - sum(before), 1e-9), 1),
        real_token_share=round(tally.tokens / tally.padded_tokens, 4) if tally.padded_tokens else 1.0,
        retries=tally.retries,
        model=", ".join(models),
        revision=tally.revision,
        **tally.made_with(),
        int8_gain=None if tally.int8_gain is None else round(tally.int8_gain, 2),
        windows=tally.windows,
        reused_rows=tally.reused_rows,
        bound=worst(tally.bounds),
        reference=tally.reference,
        deterministic=tally.kind is not None,
        kind=tally.kind,
        taken=dict(taken),
    )
