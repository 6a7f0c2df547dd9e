"""Rows that ask for tokens instead of scores, and the answers to such rows; both are JSON."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from rankmill.jobs.contract.schema import Count, WireModel

MAX_TOKEN_ID = (1 << 31) - 1

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]


class TokensAsked(WireModel):
    """A row that asks for the tokens of ``text``, or for the text of the token ids ``ids``; exactly one of
    the two is set.

    ``special`` says whether special tokens are added to the tokens of a text, or kept in the text of ids.
    With ``about``, the answer has facts about the model, and neither tokens nor a text.
    """

    text: str | None = None
    ids: tuple[TokenId, ...] | None = None
    special: bool
    about: bool = False

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.text is None) == (self.ids is None):
            raise ValueError("it has either a text or ids")
        return self

    @property
    def size(self) -> int:
        return len(self.text or self.ids or ())


class TokensFound(WireModel):
    """The answer to a `TokensAsked`: for a text its tokens, and for token ids their ``text``.

    ``ids``, ``words``, ``special`` and ``spans`` have an entry for each token. ``words`` are the tokens as
    the vocabulary has them. ``special`` marks tokens that the tokenizer has added to the text. A span is the
    index of the token's first character in the text, and the index after its last. ``most`` is the model's
    limit in tokens; the text is not cut to that limit. ``labels`` are the names of the model's outputs, only
    in an answer with facts about the model.
    """

    text: str
    ids: tuple[TokenId, ...]
    words: tuple[str, ...]
    special: tuple[bool, ...]
    spans: tuple[tuple[Count, Count], ...]
    most: Count
    labels: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _are_alike(self) -> Self:
        if len({len(self.ids), len(self.words), len(self.special), len(self.spans)}) > 1:
            raise ValueError("its ids, words, special and spans differ in length")
        return self
