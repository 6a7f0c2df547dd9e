"""A request for scores and its result, in the form that all dialects and protocols share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rankmill.extensions.gateway.refusals import Refusal
from rankmill.jobs.contract.encodings import TokensAsked, TokensFound
from rankmill.jobs.contract.home import model_of_run
from rankmill.jobs.runtime.settings import Settings
from rankmill.jobs.system import system

SpecFields: TypeAlias = dict[str, str | int | None]
"""The fields of a `ScoreSpec` that a request sets, by their names."""

MOST_ENCODED = 1 << 18
"""A request for tokens is refused if it has more than this number of characters and token ids. The limit is
low because the answer is many times larger than the request.
"""

ONE_LABEL = "LABEL_0"
"""The label of a model with a single output. The library transformers uses the same name."""


@dataclass(frozen=True)
class ScoreRequest:
    """A request for scores.

    Attributes
    ----------
    queries
        One text for all passages, or one text for each passage. With ``None``, passages are scored without a
        query.
    passages
        Texts, one for each row. Without queries, the field ``inputs`` of `spec` says what they are: texts,
        conversations, or requests for tokens (`TokensAsked`).
    model
        The model's name; ``None`` means the gateway's own model.
    spec
        The fields of `ScoreSpec` that the request sets.
    """

    queries: str | Sequence[str] | None
    passages: Sequence[str]
    model: str | None = None
    spec: Mapping[str, str | int | None] = field(default_factory=dict)

    def rows(self) -> list[tuple[str, ...]]:
        if self.queries is None:
            return [(text,) for text in self.passages]
        if isinstance(self.queries, str):
            return [(self.queries, passage) for passage in self.passages]
        return list(zip(self.queries, self.passages, strict=True))


def alone(texts: Sequence[str], model: str | None, spec: Mapping[str, str | int | None]) -> ScoreRequest:
    """Make a request for single texts or conversations, not pairs. The gateway's settings for pairs do not
    apply. For conversations, the gateway's setting ``truncation_side`` does not apply, either.

    Parameters
    ----------
    texts
        The texts.
    model
        The model's name; ``None`` means the gateway's own model.
    spec
        The fields of `ScoreSpec` that the request sets. The field ``inputs`` says what the texts are: by
        default, texts to score.
    """
    of_pairs = dict.fromkeys(("instruction", "prompt_template", "max_passage_tokens"))
    if spec.get("inputs") == "conversations":
        of_pairs["truncation_side"] = None
    return ScoreRequest(None, texts, model, {**of_pairs, "inputs": "texts", **spec})


def encoding(texts: Sequence[TokensAsked], model: str | None = None) -> ScoreRequest:
    """Make a request for the tokens of texts, or for the texts of token ids. Raises `Refusal` if the texts
    have more than `MOST_ENCODED` characters and ids.
    """
    size = sum(text.size for text in texts)
    if size > MOST_ENCODED:
        why = f"{size:,} characters or ids are more than {MOST_ENCODED:,}: send fewer at a time"
        raise Refusal("too_large", why)
    return alone([text.written() for text in texts], model, {"inputs": "tokens"})


def within(settings: Settings, model: str, spec: Mapping[str, str | int | None]) -> SpecFields:
    """Return the fields of a `ScoreSpec` for a request, without those that only the gateway's settings may
    decide. A request for another model than the gateway's own does not get the setting ``revision``.

    If the setting ``long`` splits long texts, some fields of a request have no effect:

    - With ``split-mean``, this is the field ``long``.
    - With ``split``, these are the fields ``long``, ``all_labels`` and ``label``.

    In a request with conversations, all fields count, because conversations are never split: without the
    field ``long``, they are truncated.

    Parameters
    ----------
    settings
        The gateway's settings.
    model
        The model's name for workers.
    spec
        The fields of `ScoreSpec` that the request sets.

    Raises
    ------
    Refusal
        The request asks for longer pairs than the setting ``max_length`` allows. Or the request asks for all
        labels, but with ``split`` the gateway scores only the label that the setting ``label`` names.
    """
    most, wanted = settings.max_length, spec.get("max_length")
    if most is not None and isinstance(wanted, int) and wanted > most:
        why = f"{wanted:,} tokens are more than the {most:,} of a pair: ask for fewer"
        raise Refusal("invalid", why, param="max_length")
    fixed = {"split": {"long", "all_labels", "label"}, "split-mean": {"long"}}.get(settings.long, set())
    usual: SpecFields = {"inputs": "pairs", "model": model}
    if fixed and spec.get("inputs") == "conversations":
        fixed, usual["long"] = set(), "truncate"
    if "label" in fixed and spec.get("all_labels") and settings.label is not None:
        why = f"this gateway splits long texts, and scores only the label {settings.label!r:.100}"
        raise Refusal("invalid", f"{why}: ask for a ranking, not for all labels")
    if model != model_of_run(settings.model):
        usual["revision"] = None
    return {**usual, **{name: value for name, value in spec.items() if name not in fixed}}


@dataclass(frozen=True)
class RequestScores:
    """The scores of a request, in input order.

    Attributes
    ----------
    scores
        A number for each row. If there are `labels`, a list with a number for each label. If the request asks
        for tokens, the row's number of tokens.
    tokens
        Number of computed tokens, without padding.
    seconds
        Time from the submission to the last score.
    work_seconds
        Time that the slowest chunk took in its worker.
    tokenize_seconds, forward_seconds
        Parts of `work_seconds`.
    contract
        How the scores were made, as far as this is known: for example, the precision and the proven bound of
        their error.
    labels
        Names of the model's labels; empty if each row has one score.
    found
        For a request for tokens, the answer to the `TokensAsked` of each row; empty for other requests.
    created
        Time of the answer, in seconds since 1970.
    """

    scores: Sequence[Any]
    model: str
    tokens: int = 0
    seconds: float = 0.0
    work_seconds: float = 0.0
    tokenize_seconds: float = 0.0
    forward_seconds: float = 0.0
    contract: Mapping[str, str] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    found: Sequence[TokensFound] = ()
    id: str = field(default_factory=lambda: system.unique_id())  # noqa: PLW0108 -- a simulation replaces it
    created: int = field(default_factory=lambda: int(system.now()))

    def ranked(self, top: int | None = None) -> Iterator[tuple[int, float]]:
        """Return each row's place in the input and its score, best first. Equal scores keep input order.

        Parameters
        ----------
        top
            Number of rows to return; ``None`` means all.
        """
        order = sorted(range(len(self.scores)), key=lambda place: (-self.scores[place], place))
        return ((place, self.scores[place]) for place in order[:top])

    def predictions(self) -> list[list[tuple[str, float]]]:
        """Return, for each row of a request, all labels with their scores, in the model's order of labels."""
        if not self.labels:
            return [[(ONE_LABEL, score)] for score in self.scores]
        return [list(zip(self.labels, row, strict=True)) for row in self.scores]

    def stages(self) -> dict[str, float]:
        """Return the seconds that a request has spent in the stages ``queue`` and ``work``. The stages
        ``tokenize`` and ``forward`` are parts of ``work``.
        """
        queue = max(self.seconds - self.work_seconds, 0.0)
        parts = {"tokenize": self.tokenize_seconds, "forward": self.forward_seconds}
        return {"queue": queue, "work": self.work_seconds, **parts}


def best_first(labels: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
    """Sort a row's labels by their scores, the highest first. Labels with equal scores keep their order."""
    return sorted(labels, key=lambda label: -label[1])
