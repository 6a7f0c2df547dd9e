"""The rows of a run that asks for tokens, and their results; both are JSON."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from rankmill.jobs.contract.schema import Count, WireModel

MAX_TOKEN_ID = (1 << 31) - 1

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]


class TokensAsked(WireModel):
    """A request for the tokens of a text, or for the text of token ids; exactly one of ``text`` and ``ids``
    is set.

    With ``special``, a text gets the tokenizer's special tokens, and the text of ids keeps them. With
    ``about``, the request is about the model instead.
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
    """The tokens of a text, or the ``text`` of token ids; the fields for the other case are empty.

    ``words`` are the tokens as the vocabulary has them. ``special`` says which tokens do not come from the
    text. ``spans`` are the index of each token's first character in the text and the index after its last.
    ``most`` is the most tokens that the model takes; the text is not cut to it. ``labels`` are the names of
    the model's outputs, if the request is about the model.
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
