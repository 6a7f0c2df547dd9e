"""Tokenizes texts and decodes tokens, for callers who ask for tokens instead of scores."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from rankmill.jobs.contract.encodings import TokensAsked, TokensFound
from rankmill.workers.models.tokenizer import single_texts


class TextEncoder:
    """Tokenizes texts at full length, and decodes tokens, with Hugging Face's tokenizer.

    Parameters
    ----------
    tokenizer
        A tokenizer from transformers, or a `PlainTokenizer`.
    most
        The model's limit in tokens, which the answers report; texts are not cut to it.
    labels
        Names of the model's outputs.
    """

    def __init__(self, tokenizer: Any, most: int, labels: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._most, self._labels = most, labels

    def __call__(self, rows: Sequence[str]) -> list[TokensFound]:
        """Answer rows ``[n]`` that ask for the tokens of a text, or for the text of tokens.

        Each row is a `TokensAsked` in JSON.

        Raises
        ------
        WireError
            A row is not a `TokensAsked`.
        ValueError
            The tokenizer does not tell where its tokens are in a text.
        """
        return [self._find(TokensAsked.read_json(row, "a row of tokens")) for row in rows]

    def _find(self, request: TokensAsked) -> TokensFound:
        if request.about:
            return TokensFound(
                text="", ids=(), words=(), special=(), spans=(), most=self._most, labels=self._labels
            )
        return self._text_of(request) if request.text is None else self._tokens_of(request)

    @cached_property
    def _texts(self) -> Any:
        try:
            whole = self._tokenizer.backend_tokenizer
            # Make another tokenizer, because other code sets the truncation of the model's tokenizer.
            tokenizer = single_texts(self._tokenizer)
        except (AttributeError, ValueError) as error:
            raise ValueError(f"it does not tell where its tokens are in a text ({error})") from error
        tokenizer.post_processor, tokenizer.decoder = whole.post_processor, whole.decoder
        return tokenizer

    def _text_of(self, request: TokensAsked) -> TokensFound:
        text = self._texts.decode(list(request.ids or ()), skip_special_tokens=not request.special)
        return TokensFound(text=text, ids=(), words=(), special=(), spans=(), most=self._most)

    def _tokens_of(self, request: TokensAsked) -> TokensFound:
        encoding = self._texts.encode(request.text or "", add_special_tokens=request.special)
        return TokensFound(
            text="",
            ids=tuple(encoding.ids),
            words=tuple(encoding.tokens),
            special=tuple(map(bool, encoding.special_tokens_mask)),
            spans=tuple(encoding.offsets),
            most=self._most,
        )
