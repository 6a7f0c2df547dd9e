"""Tokenizes probes with transformers, as sentence-transformers does; a worker's tokens are compared with the
result.

This module shares as little as possible with a worker's code: it reads the tokenizer from the model's files
instead of the cache, and fills templates and truncates by itself.
"""

from __future__ import annotations

from typing import Any

from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.workers.models.description import Description
from rankmill.workers.models.probes import Probe
from rankmill.workers.models.prompts import is_structured, prompt_template
from rankmill.workers.models.templates import template_options

Row = dict[str, list[int]]
"""A tokenized probe: its token ids and, from most tokenizers, an attention mask and token types."""


class ReferenceTokens:
    """Tokenizes one pair, text or conversation at a time.

    Parameters
    ----------
    spec
        The prompt, instruction and truncation to use.
    description
        The model's description, with a tokenizer from transformers.
    """

    def __init__(self, spec: ScoreSpec, description: Description) -> None:
        self._spec, self._about, self._tokenizer = spec, description, description.tokenizer
        self._prompt = description.layout.prompt if spec.instruction is None else spec.instruction
        self._template = prompt_template(spec, description) if spec.inputs == "pairs" else None
        if spec.truncation_side:
            self._tokenizer.truncation_side = spec.truncation_side

    def __call__(self, probe: Probe, max_length: int) -> Row:
        """Tokenize a probe; a null probe gets no ids, and neither does a conversation that the template
        refuses.
        """
        if probe.is_null:
            return {"input_ids": []}
        cut: dict[str, Any] = {"truncation": True, "max_length": max_length}
        if self._spec.inputs == "texts":
            return dict(self._tokenizer(self.beginning(probe.passage), **cut))
        if self._spec.inputs == "conversations":
            cut |= template_options(str(self._tokenizer.chat_template))
            try:
                return dict(self._tokenizer.apply_chat_template(probe.messages, return_dict=True, **cut))
            except Exception:  # the template refuses the messages, so the probe cannot be scored
                if not probe.before:
                    raise
                return {"input_ids": []}
        passage = self.beginning(probe.passage)
        if self._template is None:
            encoding = self._tokenizer(
                [[self._prompt + probe.query, passage]], **(cut | {"truncation": "longest_first"})
            )
            return {name: values[0] for name, values in encoding.items()}
        ids = self._chat(probe.query, passage, **cut)
        if len(ids) == max_length:  # put back what follows the passage, as sentence-transformers does
            short, long = (self._chat(text, text) for text in ("0", "1 2 3 4"))
            alike = [one == other for one, other in zip(short[::-1], long[::-1], strict=False)]
            ending = short[len(short) - alike.index(False) :] if False in alike else []
            keep = min(len(ending), max_length)
            ids[max_length - keep :] = ending[len(ending) - keep :]
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}

    def beginning(self, passage: str) -> str:
        """Return the beginning of a passage, up to ``max_passage_tokens`` of the spec."""
        most = self._spec.max_passage_tokens
        while most:
            encoding = self._tokenizer(passage, add_special_tokens=False, return_offsets_mapping=True)
            if len(encoding["input_ids"]) <= most:
                break
            end = encoding["offset_mapping"][most - 1][1]
            passage = passage[: min(end, len(passage) - 1)]  # one character may have more tokens than allowed
        return passage

    def _chat(self, query: str, passage: str, **cut: Any) -> list[int]:
        layout, template = self._about.layout, str(self._template)
        structured = is_structured(self._spec, self._about, template)
        texts = {"system": self._prompt, "query": query, "document": passage}
        messages = [
            {"role": role, "content": [{"type": "text", "text": text}] if structured else text}
            for role, text in texts.items()
            if role != "system" or text
        ]
        options = {**template_options(template), **layout.chat_options}
        encoding = self._tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=True, return_dict=True, **options, **cut
        )
        return list(encoding["input_ids"])
