"""Tokenizes texts and decodes tokens, for callers who ask for tokens instead of scores."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from rankmill.jobs.contract.encodings import TokensAsked, TokensFound
from rankmill.workers.models.tokenizer import single_texts


class TextEncoder:
    """Tokenizes and decodes texts at full length with Hugging Face's tokenizer.

    Parameters
    ----------
    tokenizer
        A tokenizer from transformers, or a `PlainTokenizer`.
    most
        Most tokens that the model takes.
    labels
        Names of the model's outputs.
    """

    def __init__(self, tokenizer: Any, most: int, labels: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._most, self._labels = most, labels

    def __call__(self, rows: Sequence[str]) -> list[TokensFound]:
        """Answer rows ``[n]``, each of which is a `TokensAsked` in JSON.

        Raises
        ------
        WireError
            A row is not a `TokensAsked`.
        ValueError
            The tokenizer does not tell where its tokens are in a text.
        """
        return [self._find(TokensAsked.read_json(row, "a row of tokens")) for row in rows]

    def _find(self, asked: TokensAsked) -> TokensFound:
        if asked.about:
            return TokensFound(
                text="", ids=(), words=(), special=(), spans=(), most=self._most, labels=self._labels
            )
        return self._text_of(asked) if asked.text is None else self._tokens_of(asked)

    @cached_property
    def _texts(self) -> Any:
        """The tokenizer without its handling of pairs and of long texts."""
        try:
            whole = self._tokenizer.backend_tokenizer
            found = single_texts(self._tokenizer)  # an own object, because others set its truncation
        except (AttributeError, ValueError) as error:
            raise ValueError(f"it does not tell where its tokens are in a text ({error})") from error
        found.post_processor, found.decoder = whole.post_processor, whole.decoder
        return found

    def _text_of(self, asked: TokensAsked) -> TokensFound:
        text = self._texts.decode(list(asked.ids or ()), skip_special_tokens=not asked.special)
        return TokensFound(text=text, ids=(), words=(), special=(), spans=(), most=self._most)

    def _tokens_of(self, asked: TokensAsked) -> TokensFound:
        found = self._texts.encode(asked.text or "", add_special_tokens=asked.special)
        return TokensFound(
            text="",
            ids=tuple(found.ids),
            words=tuple(found.tokens),
            special=tuple(map(bool, found.special_tokens_mask)),
            spans=tuple(found.offsets),
            most=self._most,
        )
