"""Tokenizes conversations for reward models, with the model's own chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from rankmill.jobs.contract.errors import SpecError
from rankmill.jobs.contract.wire import NOT_TEXT, content_texts, mended
from rankmill.workers.batches.tokens import Tokens, in_a_row, sharing
from rankmill.workers.models.fast_texts import FastTexts
from rankmill.workers.models.templates import bound_templates, template_options

Messages = list[dict[str, Any]]

PROBES = (("alpha", "bravo"), ("charlie", "bravo"), ("alpha", "foxtrot"))
"""A chat template is tested with these pairs of texts. The second pair differs from the first pair only in
its first text, and the third pair only in its second text. If one of them gives the same result as the first
pair, the template drops a text.
"""


def exchange(question: str, answer: str) -> Messages:
    """Make a conversation of two messages."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


class ConversationTokenizer:
    """Puts conversations into the model's own chat template, and tokenizes the result.

    The template writes the special tokens, so the tokenizer adds none. A text that is too long is cut. If a
    message's content is a list of texts and the template does not read lists, the texts are joined by
    newlines.

    Parameters
    ----------
    tokenizer
        The tokenizer from transformers.
    max_length
        Longest conversation in tokens.
    model
        Name of the model.

    Raises
    ------
    SpecError
        The model lacks a chat template, or its template does not take a question and an answer.
    """

    texts: FastTexts | None = None

    def __init__(self, tokenizer: Any, max_length: int, model: str) -> None:
        bound_templates()
        self.max_length = max_length
        self.pad_id = tokenizer.pad_token_id or 0
        self._tokenizer = tokenizer
        if not getattr(tokenizer, "chat_template", None):
            raise SpecError(
                f"model {model} has no chat template, which conversations (--messages-column) need",
                option="inputs",
            )
        self._options = template_options(str(tokenizer.chat_template))
        try:
            first, *others = self._ids([exchange(*probe) for probe in PROBES], cut=False)
        except Exception as error:  # an error of Jinja, or one that the template raises
            reason = " ".join(str(error).split())
            raise SpecError(
                f"the chat template of model {model} cannot be filled with question and answer: {reason}",
                option="inputs",
            ) from error
        if first in others:
            raise SpecError(
                f"the chat template of model {model} drops a message of the user or the assistant",
                option="inputs",
            )
        self._reads_lists = self._finds_texts_in_lists(first)

    def __call__(self, queries: Sequence[str], passages: Sequence[str] | None = None) -> Tokens:
        """Tokenize conversations ``[n]``, given as JSON; raises `ValueError` for text that is not a
        conversation.
        """
        chats = [[self._readable(message) for message in read_messages(text)] for text in queries]
        return sharing(in_a_row(self._ids(chats)), [json.dumps(chat[:-1]) for chat in chats])

    def _finds_texts_in_lists(self, plain: list[int]) -> bool:
        """Return whether the chat template also reads messages whose content is a list of texts.

        Parameters
        ----------
        plain
            Token ids of the first of `PROBES`, made from contents that are plain texts. Contents that are
            lists of one text must give the same ids.
        """
        lists = [{**message, "content": [_part(message["content"])]} for message in exchange(*PROBES[0])]
        with suppress(Exception):  # an error of Jinja, or one that the template raises
            return self._ids([lists], cut=False) == [plain]
        return False

    def _readable(self, message: dict[str, Any]) -> dict[str, Any]:
        """Convert a message's list of texts to what the chat template reads: a list, or one text of several
        lines.

        Raises `ValueError` for a list that contains anything other than texts.
        """
        parts = message.get("content")
        if not isinstance(parts, list):
            return message
        texts = content_texts(parts)
        if texts is None:
            raise ValueError(NOT_TEXT)
        readable = [*map(_part, texts)] if self._reads_lists else "\n".join(texts)
        return {**message, "content": readable}

    def _ids(self, chats: Sequence[Messages], *, cut: bool = True) -> list[list[int]]:
        ids: list[list[int]] = self._tokenizer.apply_chat_template(
            chats,
            tokenize=True,
            return_dict=True,
            truncation=cut,
            max_length=self.max_length if cut else None,
            padding=False,
            **self._options,
        )["input_ids"]
        return ids


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def read_messages(text: str) -> Messages:
    """Read the messages of a conversation from JSON, and leave out keys whose values are null.

    Half of a character (an unpaired surrogate) becomes U+FFFD.

    Raises
    ------
    ValueError
        The text is not a list of one or more messages, each with a role, and with a content or tool calls.
    """
    try:
        messages = json.loads(text)
        # an escape such as \ud83d can be half of a character, and tokenizers refuse halves
        if "\\ud" in text or "\\uD" in text:
            messages = json.loads(str(mended(json.dumps(messages, ensure_ascii=False))))
    except ValueError:
        raise ValueError("a conversation is a list of messages in JSON, and this is not JSON") from None
    if messages == []:
        raise ValueError("the conversation is empty: it has no message")
    if not isinstance(messages, list):
        raise ValueError(f"a conversation is a list of messages, and this is {messages!r:.40}")
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ValueError(f"message {number} is not an object with a role and a content")
        if not isinstance(message.get("role"), str):
            raise ValueError(f"message {number} has no role")
        if not isinstance(message.get("content"), str | list) and not message.get("tool_calls"):
            raise ValueError(f"message {number} has no content")
    return [{key: value for key, value in message.items() if value is not None} for message in messages]
