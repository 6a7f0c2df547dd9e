"""Rows of a run that asks for tokens, and what is found of each: both are JSON."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from rankmill.jobs.contract.schema import Count, WireModel

MAX_TOKEN_ID = (1 << 31) - 1

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]


class TokensAsked(WireModel):
    """A text whose tokens are asked for, or the ids of tokens whose text is: one of the two.

    ``special``: the text gets the tokenizer's special tokens; a text of ids keeps them. ``about``: what is
    asked for is the model instead.
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
        """Characters, or ids."""
        return len(self.text or self.ids or ())


class TokensFound(WireModel):
    """The tokens of a text; or of ids only their ``text``, which is empty else.

    ``words`` are as in the vocabulary. ``special`` tokens are not of the text; ``spans`` are the first
    character of each token in the text and the one after its last. ``most`` is the length (tokens) of what
    the model takes. A text is not cut to it. ``labels`` names the model's outputs, if they were asked for.
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
            raise ValueError("its tokens have some more ids, words or places than others")
        return self
