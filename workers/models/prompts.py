"""Which tokenizer a spec and a model need: the two texts, a text before them, or a prompt template."""

from __future__ import annotations

from rankmill.jobs.contract.errors import SpecError
from rankmill.jobs.contract.prompts import TEXTS_ALONE, answers_of, shipped_templates
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.workers.models.description import Description
from rankmill.workers.models.prompt_tokenizer import (
    PrefixedTokenizer,
    PromptTokenizer,
    is_structured,
    names_both_texts,
)
from rankmill.workers.models.tokenizer import PairTokenizer, Tokenize

_NAMED = f"--prompt-template FILE, or {', '.join(shipped_templates())}"


def tokenizer_for(spec: ScoreSpec, about: Description, max_length: int) -> Tokenize:
    """The tokenizer of a model, with the prompt that a spec and the model's files ask for.

    Raises
    ------
    SpecError
        The model needs a prompt that nothing names, or the template does not fit it.
    """
    instruction = about.layout.prompt if spec.instruction is None else spec.instruction
    template = prompt_template(spec, about)
    if template is None:
        pairs = PairTokenizer(about.tokenizer, max_length, about.joiner)
        return PrefixedTokenizer(pairs, instruction) if instruction else pairs
    chat_format = about.layout.chat_format if spec.prompt_template is None else "auto"
    return PromptTokenizer(
        about.tokenizer,
        max_length,
        template=template,
        instruction=instruction,
        structured=is_structured(template, chat_format, about.config.model_type),
        options=about.layout.chat_options,
    )


def prompt_template(spec: ScoreSpec, about: Description) -> str | None:
    """The template that pairs are put into; ``None`` if the model reads the two texts as they are.

    Raises
    ------
    SpecError
        A language model whose prompt nothing names would be scored without one, or the other way round.
    """
    if spec.prompt_template is not None and not about.is_language_model:
        raise SpecError(
            f"model {spec.model} is a {about.config.model_type} that reads two texts, not a prompt: "
            "leave out --prompt-template"
        )
    if spec.prompt_template is not None:
        return None if spec.prompt_template == TEXTS_ALONE else spec.prompt_template
    own = getattr(about.tokenizer, "chat_template", None)
    if about.layout.saved:
        if not about.layout.chat:
            return None
        if not isinstance(own, str):
            raise SpecError(f"model {spec.model} is for a chat template, and has none: use {_NAMED}")
        return own
    if not about.is_language_model and not own:
        return None
    if isinstance(own, str) and names_both_texts(own):
        return own
    raise SpecError(
        f"model {spec.model} is a language model, and its files name no prompt for pairs; without the one "
        f"that it was trained with, its scores would be random: use {_NAMED} (or {TEXTS_ALONE}: no prompt)"
    )


def answers(spec: ScoreSpec, about: Description) -> tuple[int, int | None]:
    """Ids of a language model's tokens for yes and no; for no ``None`` if the score is one logit.

    Raises
    ------
    SpecError
        The tokenizer or the model has no such token.
    """
    named = answers_of(spec.prompt_template)
    if named is None and about.layout.steps:
        config = about.layout.steps[0].config
        ids = config.get("true_token_id"), config.get("false_token_id")
        if config.get("module_input_name", "causal_logits") != "causal_logits":
            raise SpecError(f"model {spec.model} scores something other than a language model's logits")
    else:
        yes, no = named or ("yes", "no")
        ids = _token(spec, about, yes), None if no is None else _token(spec, about, no)
    size = about.config.get_text_config().vocab_size
    if not isinstance(ids[0], int) or not all(each is None or 0 <= each < size for each in ids):
        raise SpecError(f"model {spec.model} names answers {list(ids)}, which are no tokens of its {size:,}")
    return ids[0], ids[1]


def _token(spec: ScoreSpec, about: Description, word: str) -> int:
    tokenizer = about.tokenizer
    found = tokenizer.convert_tokens_to_ids(word)
    if found is None or (found == tokenizer.unk_token_id and word != tokenizer.unk_token):
        raise SpecError(
            f"model {spec.model} has no token {word!r} for its answer: name its tokens in the first line of "
            "a --prompt-template, {# answers: YES NO #}"
        )
    return int(found)
