"""Runs classifiers, language models and chains of modules in PyTorch, from token ids to logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.cache_utils import DynamicCache
from transformers.modeling_layers import GenericForSequenceClassification

from rankmill.jobs.contract.errors import SpecError
from rankmill.workers.backends.base import ModelFiles
from rankmill.workers.backends.classifier import load_config, load_pretrained
from rankmill.workers.backends.families import first_position
from rankmill.workers.backends.first_token import LastLayer, read_first_token_only
from rankmill.workers.backends.head import heads_of
from rankmill.workers.backends.torch.chain import Chain, load_chain
from rankmill.workers.backends.torch.packed import PackedRows, last_tokens
from rankmill.workers.backends.torch.prefixes import SharedPrefixes
from rankmill.workers.backends.varlen import PackedInput, packing
from rankmill.workers.batches.tokens import Batch


class AnswerProjection(nn.Module):
    """The part of a language model's last projection that computes the logits of its answers, such as yes and
    no.

    Its weights are stored as integers with the same bits, because PyTorch would cast float32 to the model's
    dtype.

    Parameters
    ----------
    whole
        The projection to the whole vocabulary.
    tokens
        The token ids of the answers yes and no; the second is ``None`` if only yes counts.
    """

    def __init__(self, whole: Any, tokens: tuple[int, int | None]) -> None:
        super().__init__()
        rows = [token for token in tokens if token is not None]
        bias = getattr(whole, "bias", None)
        added = torch.zeros(len(rows)) if bias is None else bias.detach()[rows].float()
        self._weight = nn.Buffer(whole.weight.detach()[rows].float().contiguous().view(torch.int32))
        self._bias = nn.Buffer(added.view(torch.int32))

    def forward(self, hidden: Tensor) -> Tensor:
        """Turn ``[..., width]``, of any dtype, into ``[..., answers]``."""
        weight, bias = self._weight.view(torch.float32), self._bias.view(torch.float32)
        return nn.functional.linear(hidden.float(), weight, bias)


def load_network(files: ModelFiles) -> Network:
    """Load the model of `files` on the CPU, in float32 and in evaluation mode.

    Raises
    ------
    SpecError
        The files are damaged, the weights do not fit the config, the config is not supported, the model's
        parts do not fit each other, or a language model is to be loaded without `ModelFiles.answers`.
    WorkerError
        A model of the hub does not fit into the memory of this host.
    MemoryError
        The model does not fit into the memory of this machine.
    OSError, ValueError
        From transformers, if the weights are not safetensors or cannot be read.
    """
    source, revision, layout = files.source, files.revision, files.layout
    config = load_config(source, revision)
    match layout.task:
        case "classifier":
            model = load_pretrained(AutoModelForSequenceClassification, source, revision, config)
            # CohereCompass may pool other tokens
            last = getattr(model, "pooling", "eos") == "eos"
            generic = isinstance(model, GenericForSequenceClassification)
            return LastTokenClassifier(model) if generic and last else Classifier(model)
        case "chain":
            model = load_pretrained(AutoModel, source, revision, config)
            return ChainNetwork(model, load_chain(source, revision, layout.steps, config.hidden_size))
        case "causal":
            model = load_pretrained(AutoModelForCausalLM, source, revision, config)
            if files.answers is None:
                raise SpecError(f"model {source} is a language model, and nothing names its answers")
            return CausalNetwork(model, files.answers)


class Network(nn.Module):
    """A module that computes logits ``[rows, outputs]`` from token ids, mask and types ``[rows, tokens]``,
    which are padded on the right.

    Parameters
    ----------
    model
        The model from transformers.
    heads
        Names of the last projections, which stay in float32.
    """

    def __init__(self, model: Any, heads: list[str]) -> None:
        super().__init__()
        self.model, self.heads = model, heads

    shares_prefixes = False
    """Whether tokens that several rows begin with can be computed only once, by the method ``continued``."""

    skipped: int | None = None
    """The score reads a row's last token, but skips tokens with this id. With ``None`` it skips no token."""

    def prepare_packing(self) -> bool:
        """Prepare the network to score rows without padding (packed rows), and return whether it can.

        A network can do so if transformers says that the model runs with Flash Attention, and if the model's
        last layer is found.
        """
        told = ("_supports_flash_attn", "_supports_attention_backend")
        return all(getattr(self.model, name, False) for name in told) and self._unpack_at_the_end()

    def _unpack_at_the_end(self) -> bool:
        """Make the model's last layer turn packed rows into padded ones, and return whether that layer was
        found.
        """
        body = self.model.base_model
        for path in ("encoder.layer", "transformer.layer", "layers"):
            try:
                layers = body.get_submodule(path)
            except AttributeError:
                continue
            if not isinstance(layers[-1], LastLayer):
                layers[-1] = Unpacking(layers[-1])
            return True
        return False

    def pack(self, batch: Batch) -> PackedRows:
        return PackedRows.of(batch.rows, None, self.first_position)

    @property
    def first_position(self) -> int:
        return first_position(self.model.config)

    def forward(self, ids: Tensor, mask: Tensor, types: Tensor | None = None) -> Tensor:
        segments = {} if types is None else {"token_type_ids": types}
        return self._logits(self.model(input_ids=ids, attention_mask=mask, **segments), mask)

    def packed(self, rows: PackedInput) -> Tensor:
        """Compute the logits ``[scores, outputs]`` of packed rows."""
        with packing(self.model):
            output = self.model(attention_mask=rows.mask, **_inputs(rows))
        return self._logits(output, rows.mask)

    def _logits(self, output: Any, mask: Tensor) -> Tensor:
        """Return logits from the output of the transformers model."""
        logits: Tensor = output.logits
        return logits


class Classifier(Network):
    """A sequence classifier of transformers; if possible, its last layer computes only the first token."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, [f"model.{name}" for name in heads_of(model)])
        read_first_token_only(model)


class LanguageModel(Network):
    """A language model: its tokens see only earlier tokens, so padding on the right changes nothing.

    So a prefix that several rows share has the same keys and values in all of them, and can be computed once.
    """

    def __init__(self, model: Any, heads: list[str]) -> None:
        super().__init__(model, heads)
        config = model.config
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        window = getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None)
        self.shares_prefixes = config.model_type in _SHARING and kinds == {"full_attention"} and not window

    def forward(self, ids: Tensor, mask: Tensor, types: Tensor | None = None) -> Tensor:
        states = self._run(input_ids=ids, attention_mask=mask, use_cache=False)
        return self._score(_at(states, self._last(ids, mask)))

    def continued(
        self, ids: Tensor, mask: Tensor, of: Tensor, rest: Tensor, rest_mask: Tensor, places: Tensor
    ) -> Tensor:
        """Compute the logits ``[rows, outputs]`` of rows with shared prefixes.

        The parameters are the fields of `SharedPrefixes`.
        """
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
        return self._score(_at(states, self._last(rest, rest_mask)))

    def _unpack_at_the_end(self) -> bool:
        return True  # no layer needs to change, because `_run_packed` picks the token that a score reads

    def pack(self, batch: Batch) -> PackedRows:
        return PackedRows.of(batch.rows, last_tokens(batch.rows, self.skipped), self.first_position)

    def pack_shared(self, prefixes: SharedPrefixes) -> PackedRows:
        """Pack a batch for one forward: each shared prefix once, and then the rest of each row."""
        return PackedRows.sharing(prefixes, self.skipped)

    def packed(self, rows: PackedInput) -> Tensor:
        with packing(self.model):
            return self._score(self._run_packed(rows))

    def _last(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return, for each row, the index of the token that the score reads."""
        real = mask if self.skipped is None else mask * (ids != self.skipped)
        places = torch.arange(mask.shape[1], device=mask.device)
        return (real * places).argmax(dim=1)

    def _run(self, **inputs: Any) -> Tensor:
        """Run the transformers model, and return its output for each token, ``[rows, tokens, ...]``."""
        raise NotImplementedError

    def _run_packed(self, rows: PackedInput) -> Tensor:
        """Run the transformers model on packed rows. Return its output ``[scores, ...]`` for the token from
        which each score is computed.
        """
        return self._run(use_cache=False, **_inputs(rows))[0][rows.read]

    def _score(self, states: Tensor) -> Tensor:
        """Compute logits from the model's output for one token of each row, ``[rows, ...]``."""
        raise NotImplementedError


def _at(states: Tensor, places: Tensor) -> Tensor:
    """Pick one token's output in each row, at the indices `places`, from ``[rows, tokens, ...]``."""
    return states[torch.arange(len(places), device=places.device), places]


_SHARING = frozenset({"gemma", "llama", "mistral", "qwen2", "qwen3"})
"""Types of language models in which a prefix that several rows share can be computed only once; tests show
this.
"""


class LastTokenClassifier(LanguageModel):
    """A language model with a head that reads the last token that is not padding."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, ["model.score"])
        self.skipped = model.config.get_text_config().pad_token_id

    def _run(self, **inputs: Any) -> Tensor:
        hidden: Tensor = getattr(self.model, self.model.base_model_prefix)(**inputs).last_hidden_state
        return hidden

    def _score(self, states: Tensor) -> Tensor:
        logits: Tensor = self.model.score(states)
        return logits


class CausalNetwork(LanguageModel):
    """A language model whose score is the log-odds of two answers, or the logit of one.

    The last projection computes only the logits of the answers, not those of the whole vocabulary.
    """

    def __init__(self, model: Any, answers: tuple[int, int | None]) -> None:
        super().__init__(model, [])  # `AnswerProjection` keeps itself in float32
        model.set_output_embeddings(AnswerProjection(model.get_output_embeddings(), answers))

    def _run(self, **inputs: Any) -> Tensor:
        logits: Tensor = self.model(**inputs).logits
        return logits

    def _run_packed(self, rows: PackedInput) -> Tensor:
        return self._run(use_cache=False, logits_to_keep=rows.read, **_inputs(rows))[0]

    def _score(self, logits: Tensor) -> Tensor:
        return logits[:, :1] - logits[:, 1:] if logits.shape[1] == 2 else logits


class ChainNetwork(Network):
    """A transformers model without a head, with modules of sentence-transformers that make the score."""

    def __init__(self, model: Any, chain: Chain) -> None:
        super().__init__(model, [f"chain.{name}" for name in chain.heads()])
        self.chain = chain
        if chain.reads_first_token:
            read_first_token_only(model)

    def _logits(self, output: Any, mask: Tensor) -> Tensor:
        scores: Tensor = self.chain(output.last_hidden_state, mask)
        return scores


def _inputs(rows: PackedInput) -> dict[str, Any]:
    types = {} if rows.types is None else {"token_type_ids": rows.types}
    return {"input_ids": rows.ids, "position_ids": rows.positions, "packed": rows, **types}


class Unpacking(LastLayer):
    """A last layer that takes packed rows and returns padded ones."""

    def forward(self, *inputs: Any, packed: PackedInput | None = None, **options: Any) -> Tensor:
        told = {} if packed is None else {"packed": packed}
        hidden: Tensor = self.layer(*inputs, **told, **options)
        return hidden if packed is None else packed.padded(hidden)
