"""A model as PyTorch runs it: token ids to logits, whatever it is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.cache_utils import DynamicCache
from transformers.modeling_layers import GenericForSequenceClassification

from rankmill.jobs.contract.errors import SpecError
from rankmill.workers.backends.classifier import load_config, load_pretrained
from rankmill.workers.backends.first_token import read_first_token_only
from rankmill.workers.backends.head import heads_of
from rankmill.workers.backends.torch.chain import Chain, load_chain


class AnswerProjection(nn.Module):
    """Rows of a language model's last projection, in float32 whatever the rest of the model is.

    The numbers are kept as their bits, as a module's integers are never cast.

    Parameters
    ----------
    whole
        The projection to the whole vocabulary.
    tokens
        Ids of the tokens for yes and, if the score is the log-odds, for no.
    """

    def __init__(self, whole: Any, tokens: tuple[int, int | None]) -> None:
        super().__init__()
        rows = [token for token in tokens if token is not None]
        bias = getattr(whole, "bias", None)
        added = torch.zeros(len(rows)) if bias is None else bias.detach()[rows].float()
        self._weight = nn.Buffer(whole.weight.detach()[rows].float().contiguous().view(torch.int32))
        self._bias = nn.Buffer(added.view(torch.int32))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[..., width]``, of any dtype, to ``[..., answers]``."""
        weight, bias = self._weight.view(torch.float32), self._bias.view(torch.float32)
        return nn.functional.linear(hidden.float(), weight, bias)


if TYPE_CHECKING:
    from rankmill.workers.backends.base import ModelFiles


def load_network(files: ModelFiles) -> Network:
    """The model of `files`, on the CPU, in float32, in evaluation mode.

    Raises
    ------
    SpecError
        The weights are not those of a model with this config, or the model has parts that do not fit.
    MemoryError
        The model does not fit into the memory of this machine.
    OSError, ValueError
        From transformers, when the weights are not safetensors or cannot be read.
    """
    source, revision, layout = files.source, files.revision, files.layout
    config = load_config(source, revision)
    match layout.task:
        case "classifier":
            model = load_pretrained(AutoModelForSequenceClassification, source, revision, config)
            last = isinstance(model, GenericForSequenceClassification)
            return LastTokenClassifier(model) if last else Classifier(model)
        case "chain":
            model = load_pretrained(AutoModel, source, revision, config)
            return ChainNetwork(model, load_chain(source, revision, layout.steps, config.hidden_size))
        case "causal":
            model = load_pretrained(AutoModelForCausalLM, source, revision, config)
            if files.answers is None:
                raise SpecError(f"model {source} is a language model, and nothing names its answers")
            return CausalNetwork(model, files.answers)


class Network(nn.Module):
    """Token ids, mask and types ``[rows, tokens]``, padded on the right, to logits ``[rows, outputs]``.

    Parameters
    ----------
    model
        From transformers.
    heads
        Names of the last projections, which stay in float32.
    """

    def __init__(self, model: Any, heads: list[str]) -> None:
        super().__init__()
        self.model, self.heads = model, heads

    shares_prefixes = False
    """Whether it has a method ``continued``, for rows that begin alike."""

    skipped: int | None = None
    """Id of a token that the score does not read at the end of a row."""


class Classifier(Network):
    """A sequence classifier of transformers; its last layer is replaced where `read_first_token_only` may."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, [f"model.{name}" for name in heads_of(model)])
        read_first_token_only(model)

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor | None = None
    ) -> torch.Tensor:
        segments = {} if types is None else {"token_type_ids": types}
        logits: torch.Tensor = self.model(input_ids=ids, attention_mask=mask, **segments).logits
        return logits


class LanguageModel(Network):
    """Tokens see only what is before them, so padding on the right changes nothing.

    And what rows begin with in common is the same in all of them: its keys and values are computed once.
    """

    def __init__(self, model: Any, heads: list[str]) -> None:
        super().__init__(model, heads)
        config = model.config
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        window = getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None)
        self.shares_prefixes = config.model_type in _SHARING and kinds == {"full_attention"} and not window

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._score(
            self._run(input_ids=ids, attention_mask=mask, use_cache=False), self._last(ids, mask)
        )

    def continued(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        of: torch.Tensor,
        rest: torch.Tensor,
        rest_mask: torch.Tensor,
        places: torch.Tensor,
    ) -> torch.Tensor:
        """Logits ``[rows, outputs]`` of rows that begin alike; the parameters are as of `SharedPrefixes`."""
        cache = DynamicCache(config=self.model.config)
        self._run(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True)
        cache.batch_select_indices(of)
        states = self._run(
            input_ids=rest,
            attention_mask=torch.cat([mask[of], rest_mask], dim=1),
            position_ids=places,
            past_key_values=cache,
            use_cache=True,
        )
        return self._score(states, self._last(rest, rest_mask))

    def _last(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Place of the token in each row that the score reads."""
        real = mask if self.skipped is None else mask * (ids != self.skipped)
        places = torch.arange(mask.shape[1], device=mask.device)
        return (real * places).argmax(dim=1)

    def _run(self, **inputs: Any) -> torch.Tensor:
        """What the model says of each token, ``[rows, tokens, ...]``."""
        raise NotImplementedError

    def _score(self, states: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """Logits from the states of the last tokens."""
        raise NotImplementedError


_SHARING = frozenset({"gemma", "llama", "mistral", "qwen2", "qwen3"})
"""Model types whose prefixes can be shared, as the tests show."""


class LastTokenClassifier(LanguageModel):
    """A language model with a head that reads the last token whose id is not that of padding."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, ["model.score"])
        self.skipped = model.config.get_text_config().pad_token_id

    def _run(self, **inputs: Any) -> torch.Tensor:
        hidden: torch.Tensor = getattr(self.model, self.model.base_model_prefix)(**inputs).last_hidden_state
        return hidden

    def _score(self, states: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model.score(states[torch.arange(len(last), device=last.device), last])
        return logits


class CausalNetwork(LanguageModel):
    """A language model whose score is the log-odds of two answers, or the logit of one.

    Its last projection keeps the rows of the answers alone; the rest of the vocabulary is not computed.
    """

    def __init__(self, model: Any, answers: tuple[int, int | None]) -> None:
        super().__init__(model, [])  # `AnswerProjection` is exact by itself
        model.set_output_embeddings(AnswerProjection(model.get_output_embeddings(), answers))

    def _run(self, **inputs: Any) -> torch.Tensor:
        logits: torch.Tensor = self.model(**inputs).logits
        return logits

    def _score(self, states: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        logits = states[torch.arange(len(last), device=last.device), last]
        return logits[:, :1] - logits[:, 1:] if logits.shape[1] == 2 else logits


class ChainNetwork(Network):
    """A model without a head, and the modules of sentence-transformers after it."""

    def __init__(self, model: Any, chain: Chain) -> None:
        super().__init__(model, [f"chain.{name}" for name in chain.heads()])
        self.chain = chain
        if chain.reads_first_token:
            read_first_token_only(model)

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor | None = None
    ) -> torch.Tensor:
        segments = {} if types is None else {"token_type_ids": types}
        hidden = self.model(input_ids=ids, attention_mask=mask, **segments).last_hidden_state
        scores: torch.Tensor = self.chain(hidden, mask)
        return scores
