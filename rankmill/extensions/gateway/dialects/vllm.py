"""The dialect of vLLM's server."""

from __future__ import annotations

import json
import struct
from base64 import b64encode
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from rankmill.extensions.gateway.dialects.base import (
    MAX_TEXT_CHARS,
    Body,
    Dialect,
    Document,
    JsonObject,
    Many,
    Options,
    Text,
    of_labels,
    ranking,
    spec_for,
    texts_of,
    usage,
)
from rankmill.extensions.gateway.refusals import Kind, Refusal, wrong
from rankmill.extensions.gateway.score_request import (
    RequestScores,
    ScoreRequest,
    SpecFields,
    alone,
    best_first,
    encoding,
)
from rankmill.jobs.contract.encodings import TokenId, TokensAsked
from rankmill.jobs.contract.spec import Side
from rankmill.jobs.contract.wire import NOT_TEXT, content_texts

_TYPES: dict[Kind, str] = {
    "no_model": "NotFoundError",
    "not_found": "NotFoundError",
    "conflict": "ConflictError",
    "no_key": "Unauthorized",
    "forbidden": "Forbidden",
    "busy": "TooManyRequestsError",
    "overloaded": "TooManyRequestsError",
    "backend": "InternalServerError",
    "unavailable": "ServiceUnavailableError",
    "timeout": "GatewayTimeoutError",
}


_PARAMS = {"max_length": "truncate_prompt_tokens", "max_passage_tokens": "max_tokens_per_doc"}


def _error(refusal: Refusal, status: int) -> JsonObject:
    """Make the body of vLLM's answer to a refused request.

    Do not change the sentences about texts that are too long: clients search for these words of vLLM.
    """
    kind = _TYPES.get(refusal.kind, "BadRequestError")
    message, param = refusal.message, _PARAMS.get(refusal.param or "", refusal.param)
    if refusal.tokens:
        given, most = refusal.tokens
        param = "input_tokens"
        message = (
            f"You passed {given} input tokens and requested 0 output tokens. However, the model's context "
            f"length is only {most} tokens, resulting in a maximum input length of {most} tokens. Please "
            f"reduce the length of the input prompt. (parameter=input_tokens, value={given}); {message}"
        )
    elif refusal.param == "max_length":
        message = f"{message}. Please request a smaller truncation size."
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


VLLM = Dialect("vllm", _error, {"unscorable": 400, "too_long": 400}, scale=None, long="refuse")

Some = Document | Many[Document]

ONLY_HERE = frozenset(
    {
        "user", "request_id", "truncate_prompt_tokens", "truncation_side", "use_activation", "instruction",
        "chat_template_kwargs", "max_tokens_per_query",
    }
)  # fmt: skip
"""The names of the request fields that only vLLM's API has."""


Instruction = Annotated[str, Field(max_length=10_000)]


class _Kwargs(BaseModel):
    """The variables of the model's prompt that a request may set in ``chat_template_kwargs``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    instruction: Instruction | None = None


class VllmTextOptions(Options):
    """Fields of vLLM's request bodies that change the scores of single texts and of pairs."""

    truncate_prompt_tokens: Annotated[
        int | None,
        Field(
            ge=-1,
            description="Cut longer pairs to this many tokens; -1 is the model's limit, null the path's.",
        ),
    ] = None
    truncation_side: Side | None = None
    use_activation: bool | None = None

    def spec(self, owner: Dialect) -> SpecFields:
        most = self.truncate_prompt_tokens
        if most is not None and 0 <= most < 4:
            raise wrong("truncate_prompt_tokens", "a pair has at least 4 tokens")
        return spec_for(
            owner,
            raw=self.use_activation is False,
            truncate=None if most is None else True,
            max_length=None if most == -1 else most,
            truncation_side=self.truncation_side,
        )


class VllmOptions(VllmTextOptions):
    """Fields of vLLM's request bodies that change the scores of pairs."""

    max_tokens_per_doc: Annotated[int, Field(ge=0, description="Most tokens of a document; 0 means all.")] = 0
    max_tokens_per_query: Annotated[int, Field(ge=0, le=0, description="Must be 0: there is no limit.")] = 0
    instruction: Instruction | None = None
    chat_template_kwargs: _Kwargs | None = None

    def spec(self, owner: Dialect) -> SpecFields:
        more = self.chat_template_kwargs
        of_pairs: SpecFields = {
            "max_passage_tokens": self.max_tokens_per_doc or None,
            "instruction": (more and more.instruction) or self.instruction,
        }
        given = {name: value for name, value in of_pairs.items() if value is not None}
        return super().spec(owner) | given


class _VllmBody(Body):
    dialect = VLLM

    model: str | None = None
    user: Annotated[str | None, Field(description="Has no effect.")] = None
    request_id: Annotated[str | None, Field(max_length=200)] = None
    priority: Annotated[int, Field(description="Has no effect.")] = 0

    def _list(self, kind: str, scores: RequestScores, data: list[JsonObject]) -> JsonObject:
        return {
            "id": f"{kind}-{self.request_id or scores.id}",
            "object": "list",
            "created": scores.created,
            "model": scores.model,
            "data": [{"index": place, **each} for place, each in enumerate(data)],
            "usage": usage(scores),
        }


class VllmRerank(VllmOptions, _VllmBody):
    """The body of vLLM's ``POST /rerank``, ``/v1/rerank`` and ``/v2/rerank``."""

    paths = ("/rerank", "/v1/rerank", "/v2/rerank")
    summary = "vLLM: order documents by their score with a query"

    query: Text
    documents: Some
    top_n: Annotated[int, Field(ge=0, description="Number of best documents; 0 means all.")] = 0

    def score_request(self, owner: Dialect) -> ScoreRequest:
        return ScoreRequest(self.query, _texts(self.documents), self.model, self.spec(owner))

    def answer(self, scores: RequestScores) -> JsonObject:
        shown = [{"text": text} for text in _texts(self.documents)]
        return {
            "id": f"rerank-{self.request_id or scores.id}",
            "model": scores.model,
            "usage": usage(scores),
            "results": ranking(scores, self.top_n or None, shown),
        }


class VllmScore(VllmOptions, _VllmBody):
    """The body of vLLM's ``POST /score`` and ``/v1/score``, which score one text with each of several texts,
    or the texts of two lists in pairs.
    """

    paths = ("/score", "/v1/score")
    summary = "vLLM: score pairs of texts"

    queries: Some | None = None
    documents: Some | None = None
    items: Some | None = None
    data_1: Some | None = None
    data_2: Some | None = None
    text_1: Some | None = None
    text_2: Some | None = None

    def score_request(self, owner: Dialect) -> ScoreRequest:
        first, second = self._sides()
        queries, passages = _texts(first), _texts(second)
        if len(queries) == 1:
            return ScoreRequest(queries[0], passages, self.model, self.spec(owner))
        if len(queries) != len(passages):
            counts = f"the first list has {len(queries)} texts, and the second {len(passages)}"
            raise Refusal("invalid", f"{counts}: give 1 text first, or two lists of equal length")
        return ScoreRequest(queries, passages, self.model, self.spec(owner))

    def answer(self, scores: RequestScores) -> JsonObject:
        return self._list("score", scores, [{"object": "score", "score": score} for score in scores.scores])

    def _sides(self) -> tuple[Some, Some]:
        for names in _SIDES:
            first, second = (getattr(self, name) for name in names)
            if first is not None and second is not None:
                return first, second
        pairs = ", ".join(" and ".join(names) for names in _SIDES)
        raise Refusal("invalid", f"the texts to score are missing: give {pairs}")


class VllmClassify(VllmTextOptions, _VllmBody):
    """The body of vLLM's ``POST /classify``, which asks for the probabilities of all labels for single texts
    or for a conversation.
    """

    paths = ("/classify",)
    summary = "vLLM: the probabilities of a model's labels, for texts or a conversation"

    input: Text | Many[Text] | None = None
    messages: Annotated[
        Many[JsonObject] | None,
        Field(min_length=1, description="In place of input: {role, content} for the model's chat template."),
    ] = None
    add_special_tokens: Annotated[bool | None, Field(description="True for texts, false for messages.")] = (
        None
    )
    add_generation_prompt: Annotated[bool, Field(description="Must be false.")] = False
    continue_final_message: Annotated[bool, Field(description="Must be false.")] = False
    chat_template: Annotated[str | None, Field(description="Must be null: the model's own is used.")] = None
    chat_template_kwargs: Annotated[JsonObject | None, Field(description="Must be null or empty.")] = None

    def score_request(self, owner: Dialect) -> ScoreRequest:
        self._check()
        spec = of_labels({"activation": "sigmoid", **self.spec(owner)})
        if self.messages is not None:
            return alone([_conversation(self.messages)], self.model, {**spec, "inputs": "conversations"})
        texts = [self.input] if isinstance(self.input, str) else self.input
        return alone(texts or [], self.model, spec)

    def _check(self) -> None:
        """Raise `Refusal` unless the body has either ``input`` or ``messages``, without unusual options."""
        if (self.input is None) == (self.messages is None):
            raise wrong("input", "give either input or messages")
        if self.add_special_tokens is (self.messages is not None):
            raise wrong(
                "add_special_tokens", "texts always get them, conversations only the template's: leave it out"
            )
        for name in (
            "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs",
        ):  # fmt: skip
            if self.messages is not None and getattr(self, name):
                raise wrong(name, "the model's own template is filled with the messages only: leave it out")

    def answer(self, scores: RequestScores) -> JsonObject:
        labels = [
            {
                "label": best_first(row)[0][0],
                "probs": [score for _, score in row],
                "num_classes": len(row),
            }
            for row in scores.predictions()
        ]
        return self._list("classify", scores, labels)


def _conversation(messages: list[JsonObject]) -> str:
    """Return a conversation as the JSON text that workers read. Raises `Refusal` if a message's content is
    not text, or if the conversation is too long.
    """
    contents = (message.get("content") for message in messages)
    if any(isinstance(content, list) and content_texts(content) is None for content in contents):
        raise wrong("messages", NOT_TEXT)
    written = json.dumps(messages)
    if len(written) > MAX_TEXT_CHARS:
        why = f"{len(written):,} characters are more than {MAX_TEXT_CHARS:,}: send shorter messages"
        raise wrong("messages", why)
    return written


class VllmPooling(VllmClassify):
    """The body of vLLM's ``POST /pooling`` with the task ``classify``. The answer has the probabilities of
    all labels as a vector.
    """

    paths = ("/pooling",)
    summary = "vLLM: the probabilities of a model's labels, for texts or a conversation, as vectors"

    task: Annotated[str, Field(description="Must be classify.")] = "classify"
    encoding_format: Literal["float", "base64"] = "float"

    def score_request(self, owner: Dialect) -> ScoreRequest:
        if self.task != "classify":
            why = f"Unsupported task: {self.task!r:.100}; a scorer has only the task 'classify'"
            raise Refusal("invalid", why, param="task")
        return super().score_request(owner)

    def answer(self, scores: RequestScores) -> JsonObject:
        vectors = [[score for _, score in row] for row in scores.predictions()]
        data = [{"object": "pooling", "data": self._encoded(vector)} for vector in vectors]
        return self._list("pooling", scores, data)

    def _encoded(self, vector: list[float]) -> list[float] | str:
        if self.encoding_format == "float":
            return vector
        return b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


class VllmTokenize(_VllmBody):
    """The body of vLLM's ``POST /tokenize``, which asks for the tokens of a text without truncation."""

    paths = ("/tokenize",)
    summary = "vLLM: the tokens of a text"
    batched = False

    prompt: Text
    add_special_tokens: bool = True
    return_token_strs: bool = False

    def score_request(self, owner: Dialect) -> ScoreRequest:
        return encoding([TokensAsked(text=self.prompt, special=self.add_special_tokens)], self.model)

    def answer(self, scores: RequestScores) -> JsonObject:
        (tokens,) = scores.found
        return {
            "count": len(tokens.ids),
            "max_model_len": tokens.most,
            "tokens": tokens.ids,
            "token_strs": tokens.words if self.return_token_strs else None,
        }


class VllmDetokenize(_VllmBody):
    """The body of vLLM's ``POST /detokenize``, which asks for the text of token ids."""

    paths = ("/detokenize",)
    summary = "vLLM: the text of tokens"
    batched = False

    tokens: Many[TokenId]

    def score_request(self, owner: Dialect) -> ScoreRequest:
        return encoding([TokensAsked(ids=tuple(self.tokens), special=True)], self.model)

    def answer(self, scores: RequestScores) -> JsonObject:
        (tokens,) = scores.found
        return {"prompt": tokens.text}


_SIDES = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))


def _texts(some: Some) -> list[str]:
    return texts_of(some if isinstance(some, list) else [some])


BODIES = (VllmScore, VllmRerank, VllmClassify, VllmPooling, VllmTokenize, VllmDetokenize)
