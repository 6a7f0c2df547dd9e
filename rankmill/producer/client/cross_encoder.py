"""A drop-in for sentence-transformers' `CrossEncoder` that scores on a cluster, through the queue.

>>> from rankmill import CrossEncoder                                              # doctest: +SKIP
>>> model = CrossEncoder("cross-encoder/ms-marco-MiniLM-L-6-v2")                  # doctest: +SKIP
>>> model.predict([("how far is the moon", "About 384,000 km.")])                 # doctest: +SKIP
array([-1.8], dtype=float32)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rankmill.jobs.contract.errors import ConfigError, InputError, RunFailed
from rankmill.producer.client.sync_client import Client
from rankmill.producer.collect.pairs import COLUMNS, pair_of, rows_of, tables_of

_KNOWN_ACTIVATIONS = {"Identity": "identity", "Sigmoid": "sigmoid"}
"""Classes of torch.nn that workers compute themselves."""


class CrossEncoder:
    """Scores pairs with the workers of a queue; methods and results are those of sentence-transformers.

    Parameters that say where and how to compute (``device``, ``batch_size``, ``pool``, ``chunk_size``) are
    accepted and have no effect: the workers decide. torch is imported only for results that are tensors and
    for an ``activation_fn`` other than `torch.nn.Identity` and `torch.nn.Sigmoid`.

    Parameters
    ----------
    model_name_or_path
        Model, as the setting ``model``.
    redis_url
        URL of the server; default: the settings (``REDIS_URL``).
    max_length, revision
        As the settings of these names.
    activation_fn
        Function from logits to scores; default: the model's own.
    prompts, default_prompt_name
        Texts to put before the query of a pair, by name, and the name of the one that is used by default.
    device
        Without effect.
    options
        Further settings by name, such as ``queue`` or ``precision``; for a model with several outputs
        ``all_labels=True``, or the ``label`` that is the score.

    Raises
    ------
    ConfigError
        No server is named, or a setting is unknown or invalid.
    ConnectionFailed
        No server answers.
    """

    num_labels = 1

    class ModelCard:
        """Takes what evaluators report to a model's card, and keeps nothing."""

        def set_evaluation_metrics(self, *figures: object, **more: object) -> None:
            """Ignore the figures; the evaluator also returns them."""

    model_card_data = ModelCard()

    def __init__(
        self,
        model_name_or_path: str,
        *,
        redis_url: str | None = None,
        max_length: int | None = None,
        revision: str | None = None,
        activation_fn: Callable[[Any], Any] | None = None,
        prompts: Mapping[str, str] | None = None,
        default_prompt_name: str | None = None,
        device: object = None,
        **options: Any,
    ) -> None:
        given = {"max_length": max_length, "revision": revision}
        options |= {name: value for name, value in given.items() if value is not None}
        self.client = Client(redis_url, model=model_name_or_path, **options)
        self.activation_fn = activation_fn
        self.prompts = dict(prompts or {})
        self.default_prompt_name = default_prompt_name
        self._prompt(None, None)  # raises for a default that does not exist

    def predict(
        self,
        inputs: Any,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        activation_fn: Callable[[Any], Any] | None = None,
        apply_softmax: bool | None = False,
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        device: object = None,
        pool: object = None,
        chunk_size: int | None = None,
    ) -> Any:
        """Score pairs.

        Parameters
        ----------
        inputs
            Pairs of texts, or one pair; or a table with the columns ``query`` and ``passage``, of any kind
            that `Client.submit` takes.
        prompt_name, prompt
            The prompt, by name or as a text.
        show_progress_bar
            Whether to show progress on standard error.
        activation_fn
            Function from logits to scores; default: that of the constructor.
        convert_to_numpy, convert_to_tensor
            Whether the result is an array (the default), a tensor, or a list of tensors.
        apply_softmax
            With ``all_labels``: whether a pair's scores are made to add up to 1.
        batch_size, device, pool, chunk_size
            Without effect.

        Returns
        -------
        float32 scores of shape ``[n]``, or ``[n, labels]`` with ``all_labels``; of one pair without ``n``.

        Raises
        ------
        InputError
            An input is not a pair of texts.
        RunFailed
            The run failed, or a pair has no score; the message says why.
        """
        is_one = _is_pair(inputs)
        text = self._prompt(prompt, prompt_name)
        tables = None if is_one else tables_of(inputs, COLUMNS)
        if tables is None:
            items = [inputs] if is_one else rows_of(inputs) if isinstance(inputs, np.ndarray) else inputs
            pairs: Any = [*_prompted(items, text)]
        else:
            pairs = _prompted_tables(tables, text)
        scores = self._scores(pairs, activation_fn, show_progress_bar)
        if apply_softmax and scores.ndim > 1:
            powers = np.exp(scores - scores.max(axis=1, keepdims=True))
            scores = powers / powers.sum(axis=1, keepdims=True)
        if convert_to_tensor:
            found: Any = _torch().from_numpy(scores)
        elif convert_to_numpy:
            found = scores
        else:
            found = list(_torch().from_numpy(scores))
        return found[0] if is_one else found

    def rank(
        self,
        query: str,
        documents: Sequence[str],
        top_k: int | None = None,
        return_documents: bool = False,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        activation_fn: Callable[[Any], Any] | None = None,
        device: object = None,
        pool: object = None,
        chunk_size: int | None = None,
    ) -> list[dict[str, Any]]:
        """Order `documents` by their score with `query`, best first.

        Returns
        -------
        At most `top_k` of ``{"corpus_id": index, "score": score}``, with ``"text"`` if `return_documents`.

        Raises
        ------
        InputError, RunFailed
            As `predict`.
        """
        scores = self.predict(
            [(query, document) for document in documents],
            prompt_name,
            prompt,
            show_progress_bar=show_progress_bar,
            activation_fn=activation_fn,
        )
        if scores.ndim > 1:
            raise ConfigError("all_labels: documents are ranked by one score; name its label instead")
        found = []
        for index in np.argsort(-scores, kind="stable")[:top_k]:
            each: dict[str, Any] = {"corpus_id": int(index), "score": scores[index]}
            found.append(each | ({"text": documents[index]} if return_documents else {}))
        return found

    def _scores(
        self,
        pairs: list[tuple[str, str]] | pa.RecordBatchReader,
        activation_fn: Callable[[Any], Any] | None,
        show_progress_bar: bool | None,
    ) -> npt.NDArray[np.float32]:
        if isinstance(pairs, list) and not pairs:
            return np.zeros(0, np.float32)
        function = activation_fn or self.activation_fn
        known = _KNOWN_ACTIVATIONS.get(type(function).__name__) if function else None
        spec: dict[str, Any] = {} if function is None else {"activation": known or "identity"}
        run = self.client.submit(pairs, **spec)
        try:
            found = run.scores(show_progress=bool(show_progress_bar))
        except BaseException:
            run.cancel()
            raise
        if run.errors:
            row, reason = next(iter(run.errors.items()))
            raise RunFailed(
                f"{len(run.errors):,} of {len(found):,} pairs have no score; pair {row}: {reason}"
            )
        scores = np.asarray(found, np.float32)
        if function and not known:
            logits = _torch().from_numpy(scores.reshape(len(scores), -1))
            scores = np.asarray(function(logits), np.float32).reshape(scores.shape)
        return scores

    def _prompt(self, prompt: str | None, name: str | None) -> str:
        """The text to put before each query."""
        name = name or self.default_prompt_name
        if prompt is not None or name is None:
            return prompt or ""
        if name not in self.prompts:
            raise ConfigError(f"no prompt {name!r}; there are {', '.join(map(repr, self.prompts)) or 'none'}")
        return self.prompts[name]


def _is_pair(inputs: Any) -> bool:
    """Whether `inputs` is one pair of texts."""
    if isinstance(inputs, np.ndarray):
        return inputs.size > 0 and inputs.ndim < 2 and inputs.dtype.names is None
    return isinstance(inputs, list | tuple) and len(inputs) > 0 and isinstance(inputs[0], str)


def _prompted(pairs: Iterable[Any], prompt: str) -> Iterator[tuple[str, str]]:
    for row, pair in enumerate(pairs):
        texts = pair_of(pair, row, COLUMNS) if isinstance(pair, Mapping) else tuple(pair)
        if isinstance(pair, str) or len(texts) != 2 or not all(isinstance(text, str) for text in texts):
            raise InputError(f"pair {row} is {pair!r:.80}, not a query and a passage (two strings)")
        yield prompt + str(texts[0]), str(texts[1])


def _prompted_tables(tables: Iterator[pa.Table], prompt: str) -> pa.RecordBatchReader:
    schema = pa.schema([(name, pa.large_string()) for name in COLUMNS])
    before, between = pa.scalar(prompt, pa.large_string()), pa.scalar("", pa.large_string())

    def batches() -> Iterator[pa.RecordBatch]:
        for table in tables:
            for batch in table.select(list(COLUMNS)).cast(schema).to_batches():
                query = pc.binary_join_element_wise(before, batch["query"], between)
                yield pa.record_batch([query, batch["passage"]], schema=schema)

    return pa.RecordBatchReader.from_batches(schema, batches())


def _torch() -> Any:
    """Torch, which the caller has, because it asks for tensors."""
    if "torch" in sys.modules:
        return sys.modules["torch"]
    try:
        return import_module("torch")
    except ImportError:
        raise ConfigError("tensors need torch, which is not installed here; use convert_to_numpy") from None
