"""Chooses the prompt for a spec and a model, and tokenizes pairs that are put into it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rankmill.jobs.contract.errors import SpecError
from rankmill.jobs.contract.prompts import TEXTS_ALONE, answers_of, shipped_templates
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.workers.batches.tokens import Tokens, ends, in_a_row, sharing, spans
from rankmill.workers.models.conversations import PROBES, ConversationTokenizer
from rankmill.workers.models.description import Description
from rankmill.workers.models.fast_texts import FastTexts
from rankmill.workers.models.templates import bound_templates, template_options
from rankmill.workers.models.tokenizer import PairTokenizer, Tokenize, sample_pairs

_STRUCTURED = ("content[0]", ".type", "'type'", '"type"', "message.content[")
"""Signs by which sentence-transformers guesses that a template reads content as a list."""

_FLAT_TYPES = frozenset({"apertus", "deepseek_v3", "gpt_oss", "seed_oss"})

_NAMED = f"--prompt-template FILE, or {', '.join(shipped_templates())}"


class PromptTokenizer:
    """Puts pairs into a chat template, and tokenizes the result.

    The two texts are messages with the roles ``query`` and ``document``; an instruction is a message with the
    role ``system``. A prompt that is too long is cut at one side. The last tokens of the cut prompt are
    replaced by the tokens that the template writes after the passage, because the model needs these to
    answer.

    Parameters
    ----------
    spec, description
        The options and the model. They set the instruction, the side at which prompts are cut, and the
        template's other variables. An empty instruction is left out.
    max_length
        Longest prompt in tokens.
    template
        A Jinja template.

    Raises
    ------
    SpecError
        The template cannot be filled, or drops one of the texts or the spec's instruction.
    """

    def __init__(self, spec: ScoreSpec, description: Description, max_length: int, template: str) -> None:
        bound_templates()
        self._tokenizer = tokenizer = description.tokenizer
        self.max_length, self._template = max_length, template
        self.pad_id = tokenizer.pad_token_id or 0
        self._from_left = (spec.truncation_side or tokenizer.truncation_side) == "left"
        self._instruction = instruction = _instruction(spec, description)
        self._structured = is_structured(spec, description, template)
        self._options = {**template_options(template), **description.layout.chat_options}
        texts = [*map(list, zip(*PROBES, strict=True))]
        try:
            first, *others = self.rendered(*texts)
        except Exception as error:  # an error of Jinja, or one that the template raises
            reason = " ".join(str(error).split())
            raise SpecError(
                f"the prompt template cannot be filled with a query and a passage: {reason}",
                option="instruction" if instruction and self._fills_without_instruction() else None,
            ) from error
        dropped = [role for role, text in zip(("query", "document"), others, strict=True) if text == first]
        if dropped:
            raise SpecError(
                f"the prompt template drops the text of the role {dropped[0]}: name it in the template"
            )
        if spec.instruction and self.rendered(*texts, instruction=f"charlie {instruction}")[0] == first:
            raise SpecError(
                f"the prompt template of model {spec.model} drops the instruction: leave it out, or give a "
                "template that writes the text of the role system",
                option="instruction",
            )
        self._ending = self._find_ending()
        joiner = description.joiner
        self.texts = joiner.texts if joiner and self._agrees(joiner.texts) else None

    def __call__(self, queries: Sequence[str], passages: Sequence[str] | None = None) -> Tokens:
        assert passages is not None
        prompts = self.rendered(queries, passages)
        return sharing(self._cut(self.texts(prompts) if self.texts else self._encoded(prompts)), queries)

    def _cut(self, tokens: Tokens) -> Tokens:
        long = np.flatnonzero(tokens.lengths >= self.max_length)
        if not len(long):
            return tokens
        lengths = np.minimum(tokens.lengths, self.max_length)
        left_out = tokens.lengths - lengths if self._from_left else 0
        ids = tokens.ids[spans(tokens.offsets[:-1] + left_out, lengths)]
        offsets = ends(lengths)
        keep = min(len(self._ending), self.max_length)
        ids[offsets[1:][long][:, None] + np.arange(-keep, 0)] = self._ending[len(self._ending) - keep :]
        return Tokens(ids, None, offsets)

    def rendered(
        self, queries: Sequence[str], passages: Sequence[str], *, instruction: str | None = None
    ) -> list[str]:
        """Put pairs ``[n]`` into the template; returns the prompts as text. With `instruction`, the prompts
        have this instruction instead of the tokenizer's.
        """

        def content(text: str) -> Any:
            return [{"type": "text", "text": text}] if self._structured else text

        system_text = self._instruction if instruction is None else instruction
        system = [{"role": "system", "content": content(system_text)}] if system_text else []
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

    def _fills_without_instruction(self) -> bool:
        """Return whether the prompt template can be filled without an instruction."""
        try:
            self.rendered(*map(list, zip(*PROBES, strict=True)), instruction="")
        except Exception:
            return False
        return True

    def _encoded(self, prompts: list[str]) -> Tokens:
        ids: list[list[int]] = self._tokenizer(
            prompts, add_special_tokens=False, padding=False, truncation=False, return_attention_mask=False
        )["input_ids"]
        return in_a_row(ids)

    def _agrees(self, texts: FastTexts) -> bool:
        prompts = self.rendered(*sample_pairs(self._tokenizer))
        ours, theirs = texts(prompts), self._encoded(prompts)
        return np.array_equal(ours.ids, theirs.ids) and np.array_equal(ours.offsets, theirs.offsets)

    def _find_ending(self) -> list[int]:
        """Return the token ids that the template puts after the passage. The prompts of two different pairs
        both end with them.
        """
        both = self._encoded(self.rendered(["0", "1 2 3 4"], ["0", "1 2 3 4"]))
        short, long = (part.tolist() for part in np.split(both.ids, both.offsets[1:2]))
        backwards = enumerate(zip(short[::-1], long[::-1], strict=False))
        count = next((number for number, (one, other) in backwards if one != other), 0)
        ending: list[int] = short[len(short) - count :]
        return ending


def _instruction(spec: ScoreSpec, description: Description) -> str:
    return description.layout.prompt if spec.instruction is None else spec.instruction


def is_structured(spec: ScoreSpec, description: Description, template: str) -> bool:
    """Whether a template reads a message's content as a list, as sentence-transformers decides it."""
    chat_format = description.layout.chat_format if spec.prompt_template is None else "auto"
    if chat_format != "auto":
        return chat_format == "structured"
    guess = any(sign in template for sign in _STRUCTURED)
    return guess and description.config.model_type not in _FLAT_TYPES


def tokenizer_for(spec: ScoreSpec, description: Description, max_length: int) -> Tokenize:
    """Make the tokenizer of a model, with the prompt that a spec or the model's files ask for.

    Raises
    ------
    SpecError
        The model needs a prompt but nothing names one, the template does not fit the model, or the model
        cannot score these inputs.
    """
    if spec.inputs == "tokens":
        return PairTokenizer(description.tokenizer, max_length, None)
    if spec.inputs != "pairs" and description.layout.task != "classifier":
        why = f"model {spec.model} is not a sequence classifier of transformers: it scores only pairs"
        raise SpecError(why, option="inputs")
    if spec.inputs == "texts":
        joiner, side = description.joiner_alone, spec.truncation_side
        return PairTokenizer(description.tokenizer, max_length, joiner, side)
    if spec.inputs == "conversations":
        return ConversationTokenizer(description.tokenizer, max_length, spec.model)
    template = prompt_template(spec, description)
    if template is not None:
        return PromptTokenizer(spec, description, max_length, template)
    joiner, side, instruction = description.joiner, spec.truncation_side, _instruction(spec, description)
    return PairTokenizer(description.tokenizer, max_length, joiner, side, instruction)


def prompt_template(spec: ScoreSpec, description: Description) -> str | None:
    """Choose the template that pairs are put into; ``None`` if the model reads the two texts as they are.

    Raises
    ------
    SpecError
        A language model has no prompt, or a model of another kind is given one.
    """
    if spec.prompt_template is not None and not description.is_language_model:
        raise SpecError(
            f"model {spec.model} is a {description.config.model_type} that reads two texts, not a prompt: "
            "leave out --prompt-template",
            option="prompt_template",
        )
    if spec.prompt_template is not None:
        return None if spec.prompt_template == TEXTS_ALONE else spec.prompt_template
    own = getattr(description.tokenizer, "chat_template", None)
    if description.layout.saved:
        if not description.layout.chat:
            return None
        if not isinstance(own, str):
            raise SpecError(f"model {spec.model} is for a chat template, and has none: use {_NAMED}")
        return own
    if not description.is_language_model and not own:
        return None
    if isinstance(own, str) and "query" in own and "document" in own:  # the roles of a template for pairs
        return own
    raise SpecError(
        f"model {spec.model} is a language model, and its files name no prompt for pairs; without the one "
        f"that it was trained with, its scores would be random: use {_NAMED} (or {TEXTS_ALONE}: no prompt)"
    )


def answers(spec: ScoreSpec, description: Description) -> tuple[int, int | None]:
    """The token ids of a language model's answers yes and no. The second is ``None`` if only yes counts.

    Raises
    ------
    SpecError
        The tokenizer or the model lacks an answer's token, or the model scores something other than its
        logits.
    """
    named = answers_of(spec.prompt_template)
    if named is None and description.layout.steps:
        config = description.layout.steps[0].config
        ids = config.get("true_token_id"), config.get("false_token_id")
        if config.get("module_input_name", "causal_logits") != "causal_logits":
            raise SpecError(f"model {spec.model} scores something other than a language model's logits")
    else:
        yes, no = named or ("yes", "no")
        ids = _token(spec, description, yes), None if no is None else _token(spec, description, no)
    size = description.config.get_text_config().vocab_size
    if not isinstance(ids[0], int) or not all(token_id is None or 0 <= token_id < size for token_id in ids):
        raise SpecError(f"model {spec.model} names answers {list(ids)}: its tokens are 0 to {size - 1:,}")
    return ids[0], ids[1]


def _token(spec: ScoreSpec, description: Description, word: str) -> int:
    tokenizer = description.tokenizer
    token_id = tokenizer.convert_tokens_to_ids(word)
    if token_id is None or (token_id == tokenizer.unk_token_id and word != tokenizer.unk_token):
        raise SpecError(
            f"model {spec.model} has no token {word!r} for its answer: name its tokens in the first line of "
            "a --prompt-template, {# answers: YES NO #}"
        )
    return int(token_id)
