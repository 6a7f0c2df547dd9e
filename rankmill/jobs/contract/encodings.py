"""Rows that ask for tokens instead of scores, and the answers to such rows; both are JSON."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from rankmill.jobs.contract.schema import Count, WireModel

MAX_TOKEN_ID = (1 << 31) - 1

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]


class TokensAsked(WireModel):
    """A row that asks for the tokens of a text, or for the text of token ids.

    Attributes
    ----------
    text, ids
        The text, or else the token ids; exactly one of the two is set.
    special
        Whether special tokens are added to a text, or kept in the text of token ids.
    about
        Whether the answer has only facts about the model, such as its limit in tokens.
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
    """The answer to a `TokensAsked`: the tokens of a text, or the text of token ids.

    ``ids``, ``words``, ``special`` and ``spans`` have an entry for each token of a text.

    Attributes
    ----------
    text
        The text of token ids.
    words
        The tokens as the vocabulary writes them.
    special
        Whether the tokenizer has added the token to the text.
    spans
        Index of the token's first character in the text, and index after its last one.
    most
        The model's limit in tokens. The text is not cut to this limit.
    labels
        Names of the model's outputs, only in an answer with facts about the model.
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
