"""Tokenizes pairs for models that read them in a prompt: a chat template, as `CrossEncoder` fills it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rankmill.jobs.contract.errors import SpecError
from rankmill.workers.batches.tokens import Tokens, joined

_PROBES = (("alpha", "bravo"), ("charlie", "bravo"), ("alpha", "foxtrot"))
"""A pair, one with another query, and one with another passage."""

_STRUCTURED = ("content[0]", ".type", "'type'", '"type"', "message.content[")
"""What a template has that reads content as a list, as sentence-transformers guesses it."""

_FLAT_TYPES = frozenset({"apertus", "deepseek_v3", "gpt_oss", "seed_oss"})


class PromptTokenizer:
    """Puts pairs into a chat template and tokenizes the whole.

    The two texts are messages of the roles ``query`` and ``document``, and the instruction, if there is
    one, that of ``system``. A prompt that is too long is cut at its end; the tokens after the passage,
    which the model needs to answer, then take the place of the last that are left.

    Parameters
    ----------
    tokenizer
        From transformers.
    max_length
        Longest prompt in tokens.
    template
        A Jinja template.
    instruction
        Text for the role ``system``; empty: no such message.
    structured
        Whether the template reads contents as lists.
    options
        Other variables of the template.

    Raises
    ------
    SpecError
        The template cannot be filled, or drops one of the texts.
    """

    def __init__(
        self,
        tokenizer: Any,
        max_length: int,
        *,
        template: str,
        instruction: str,
        structured: bool,
        options: dict[str, Any],
    ) -> None:
        self.max_length = max_length
        self.pad_id = tokenizer.pad_token_id or 0
        self._tokenizer, self._template, self._options = tokenizer, template, options
        self._instruction, self._structured = instruction, structured
        try:
            first, *others = self.rendered(*map(list, zip(*_PROBES, strict=True)))
        except Exception as error:  # Jinja's errors, or what a template itself raises
            reason = " ".join(str(error).split())
            raise SpecError(
                f"the prompt template cannot be filled with a query and a passage: {reason}"
            ) from error
        dropped = [role for role, text in zip(("query", "document"), others, strict=True) if text == first]
        if dropped:
            raise SpecError(
                f"the prompt template drops the text of the role {dropped[0]}: name it in the template"
            )
        self._ending = self._find_ending()

    def __call__(self, queries: Sequence[str], passages: Sequence[str]) -> Tokens:
        """Tokenize pairs ``[n]``."""
        rows = self._encoded(self.rendered(queries, passages))
        return joined([self._cut(row) for row in rows], queries)

    def _cut(self, row: list[int]) -> list[int]:
        if len(row) < self.max_length:
            return row
        left = self._tokenizer.truncation_side == "left"
        cut = row[-self.max_length :] if left else row[: self.max_length]
        keep = min(len(self._ending), len(cut))
        return cut[: len(cut) - keep] + self._ending[len(self._ending) - keep :]

    def rendered(self, queries: Sequence[str], passages: Sequence[str]) -> list[str]:
        """The prompts of pairs ``[n]``, as text."""

        def content(text: str) -> Any:
            return [{"type": "text", "text": text}] if self._structured else text

        system = [{"role": "system", "content": content(self._instruction)}] if self._instruction else []
        chats = [
            [
                *system,
                {"role": "query", "content": content(query)},
                {"role": "document", "content": content(passage)},
            ]
            for query, passage in zip(queries, passages, strict=True)
        ]
        texts: list[str] = self._tokenizer.apply_chat_template(
            chats, chat_template=self._template, tokenize=False, **self._options
        )
        return texts

    def _encoded(self, texts: list[str]) -> list[list[int]]:
        ids: list[list[int]] = self._tokenizer(
            texts, add_special_tokens=False, padding=False, truncation=False, return_attention_mask=False
        )["input_ids"]
        return ids

    def _find_ending(self) -> list[int]:
        """The tokens after the passage, as sentence-transformers finds them: what two short prompts share."""
        short, long = self._encoded(self.rendered(["0", "1 2 3 4"], ["0", "1 2 3 4"]))
        count = 0
        while count < min(len(short), len(long)) and short[-1 - count] == long[-1 - count]:
            count += 1
        return short[len(short) - count :] if 0 < count < min(len(short), len(long)) else []


def is_structured(template: str, chat_format: str, model_type: str) -> bool:
    """Whether a template reads contents as lists, as sentence-transformers decides it."""
    if chat_format != "auto":
        return chat_format == "structured"
    return model_type not in _FLAT_TYPES and any(sign in template for sign in _STRUCTURED)


def names_both_texts(template: str) -> bool:
    """Whether a template was written for pairs: it names their roles."""
    return "query" in template and "document" in template


class PrefixedTokenizer:
    """Puts a text before each query, as `CrossEncoder` does with a prompt where there is no chat template.

    Parameters
    ----------
    tokenizer
        Tokenizes pairs.
    prompt
        The text.
    """

    def __init__(self, tokenizer: Any, prompt: str) -> None:
        self._tokenizer, self._prompt = tokenizer, prompt
        self.max_length: int = tokenizer.max_length
        self.pad_id: int = tokenizer.pad_id

    def __call__(self, queries: Sequence[str], passages: Sequence[str]) -> Tokens:
        """Tokenize pairs ``[n]``."""
        tokens: Tokens = self._tokenizer([self._prompt + query for query in queries], passages)
        return tokens
