"""The tokens of texts, and the texts of tokens, for callers who ask for these and not for scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rankmill.jobs.contract.encodings import TokensAsked, TokensFound
from rankmill.jobs.contract.errors import SpecError
from rankmill.workers.models.tokenizer import single_texts


class TextEncoder:
    """Hugging Face's tokenizer of a model, for texts at their full length.

    Parameters
    ----------
    tokenizer
        From transformers, or a `PlainTokenizer`.
    most
        Tokens that the model takes.
    model
        Name of the model.

    Raises
    ------
    SpecError
        The tokenizer does not tell where its tokens are in a text.
    """

    def __init__(self, tokenizer: Any, most: int, model: str) -> None:
        try:
            whole = tokenizer.backend_tokenizer
            self._texts = single_texts(tokenizer)  # its own, as others truncate
        except (AttributeError, ValueError) as error:
            why = f"the tokenizer of model {model} does not tell where its tokens are in a text"
            raise SpecError(f"{why} ({error})") from error
        self._texts.post_processor, self._texts.decoder = whole.post_processor, whole.decoder
        self._most = most

    def __call__(self, rows: Sequence[str]) -> list[TokensFound]:
        """What is found of rows ``[n]``; raises `WireError` for one that is no `TokensAsked`."""
        asked = [TokensAsked.read_json(row, "a row of tokens") for row in rows]
        return [self._text_of(each) if each.text is None else self._tokens_of(each) for each in asked]

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
