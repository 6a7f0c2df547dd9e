"""A drop-in for sentence-transformers' `CrossEncoder` that scores on a cluster, through the queue.

>>> from rankmill import CrossEncoder                                              # doctest: +SKIP
>>> model = CrossEncoder("cross-encoder/ms-marco-MiniLM-L-6-v2")                  # doctest: +SKIP
>>> model.predict([("how far is the moon", "About 384,000 km.")])                 # doctest: +SKIP
array([-1.8], dtype=float32)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, overload

import numpy as np
import numpy.typing as npt

from rankmill.jobs.contract.errors import ConfigError, InputError, RunFailed
from rankmill.jobs.contract.home import shipped
from rankmill.jobs.runtime.settings import BASE, Settings, merge_settings, validate
from rankmill.producer.client.runs import check_top_k
from rankmill.producer.client.sync_client import Client

if TYPE_CHECKING:
    from rankmill.producer.collect.pairs import Pairs

_KNOWN_ACTIVATIONS = {"Identity": "identity", "Sigmoid": "sigmoid"}
"""Activation functions that workers can compute, by the names of their classes in torch.nn. Other functions
are applied in this process, to the logits that workers return.
"""

_DEVICES = frozenset({"cpu", "cuda", "mps"})

_PRECISIONS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}

_REFUSED = {
    "modules": "workers load models from their files",
    "trust_remote_code": "code from model repositories is never run",
    "cache_folder": "workers keep the models; set HF_HUB_CACHE where they run",
    "local_files_only": "workers read the models; set HF_HUB_OFFLINE=1 where they run",
    "token": "workers read the models; set HF_TOKEN where they run",
    "classifier_dropout": "nothing is trained here",
    "keep_in_fp32_modules": "the last projection computes in fp32 in every precision",
}
"""Arguments of sentence-transformers' `CrossEncoder` that rankmill's class refuses, each with the reason."""

_MODEL = frozenset({"attn_implementation", "device_map", "low_cpu_mem_usage"})
_PROCESSOR = frozenset({"padding_side", "use_fast"})
"""Entries of ``model_kwargs`` and ``processor_kwargs`` that are accepted and ignored, because they do not
change scores.
"""

_OLDER_OF_RANK = frozenset({"apply_softmax", "convert_to_numpy", "convert_to_tensor", "num_workers"})

_OF_CALLS = "the constructor has what concerns the tokenizer, and workers decide how they compute"

_ASSIGNED = frozenset(
    {"activation_fn", "client", "default_prompt_name", "max_length", "max_seq_length", "prompts"}
)


class CrossEncoder:
    """Scores pairs through a queue; its methods and results are those of sentence-transformers' class.

    If no server is set, the object starts one with workers on this host, which needs ``rankmill[worker]``.
    All objects of this process that need equal workers share this server and its workers. They end with the
    last `close`, or with the process.

    Some arguments say where and how to compute: ``device``, ``batch_size``, ``num_workers``, ``pool``,
    ``chunk_size``, ``attn_implementation``, ``device_map``. They are accepted, but the workers decide. The
    following cannot be obeyed, and raise `ConfigError`:

    - The arguments ``modules``, ``trust_remote_code``, ``cache_folder``, ``token``, ``classifier_dropout``
      and ``keep_in_fp32_modules``; and ``local_files_only``, unless the model is a folder.
    - Entries of ``model_kwargs``, ``processor_kwargs`` and ``config_kwargs`` that may change scores, except
      those listed below. (An entry such as ``use_fast`` changes no score.)
    - Assignments to most attributes.
    - Calls that name no prompt, if ``prompts`` was given without ``default_prompt_name``.

    torch is imported only for results that are tensors, for `device`, and for an ``activation_fn`` that is
    neither `torch.nn.Identity` nor `torch.nn.Sigmoid`. transformers is imported only for `tokenizer` and
    `config`.

    Parameters
    ----------
    model_name_or_path
        The model, as in the setting ``model``.
    redis_url
        URL of the server. By default, it is taken from the settings (``REDIS_URL``); if they have none, this
        process starts a server.
    max_length, revision
        As in the settings of these names.
    num_labels
        Number of the model's outputs. If the model has another number, calls fail, unless ``label`` is set or
        ``long`` is ``split``.
    activation_fn
        Function that turns logits into scores; by default the model's own function.
    prompts, default_prompt_name
        Texts to put before the query of a pair, by name; and the name of the default text.
    device
        ``cpu``, ``cuda`` or ``mps``, for workers that this process starts.
    model_kwargs
        ``dtype`` or ``torch_dtype``, which is the precision.
    processor_kwargs
        ``model_max_length`` and ``truncation_side``.
    config_kwargs
        ``num_labels``.
    options
        Further settings by name, such as ``queue``, ``label`` or ``precision`` (by default ``fp32``, unless
        the settings name another).

    Raises
    ------
    ConfigError
        An argument is refused, or a setting is unknown or invalid.
    ConnectionFailed
        No server answers.
    EmbeddedError
        The server cannot be started.
    """

    class ModelCard:
        """Takes metrics that sentence-transformers' evaluators write to a model card, and drops them."""

        def set_evaluation_metrics(self, *figures: object, **more: object) -> None:
            """Ignore the metrics of an evaluator; the evaluator also returns them."""

    model_card_data = ModelCard()

    def __init__(
        self,
        model_name_or_path: str | None = None,
        *,
        redis_url: str | None = None,
        max_length: int | None = None,
        revision: str | None = None,
        num_labels: int | None = None,
        activation_fn: Callable[[Any], Any] | None = None,
        prompts: Mapping[str, str] | None = None,
        default_prompt_name: str | None = None,
        device: object = None,
        model_kwargs: Mapping[str, Any] | None = None,
        processor_kwargs: Mapping[str, Any] | None = None,
        config_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if model_name_or_path is None:
            raise ConfigError("model_name_or_path: name a model; workers load models from their files")
        activation_fn = _older(options, activation_fn, "default_activation_function")
        model_kwargs = _older(options, model_kwargs, "automodel_args")
        processor_kwargs = _older(options, processor_kwargs, "tokenizer_kwargs", "tokenizer_args")
        labels = {"num_labels": num_labels} | (_older(options, config_kwargs, "config_args") or {})
        _refuse_entries("config_kwargs", labels, {"num_labels"}, "workers read the model's own config")
        _refuse_arguments(options, str(model_name_or_path))
        kind = str(device).partition(":")[0]
        given = {
            "model": str(model_name_or_path),
            "redis_url": redis_url,
            "max_length": max_length,
            "revision": revision,
            "device": kind if kind in _DEVICES else None,
        }
        options |= {name: value for name, value in given.items() if value is not None}
        for name, value in {
            **_precision_of(model_kwargs or {}),
            **_lengths_of(processor_kwargs or {}),
        }.items():
            if options.setdefault(name, value) != value:
                raise ConfigError(f"{name} is given twice, {options[name]!r} and {value!r}: leave out one")
        self.prompts = dict(prompts or {})
        self.default_prompt_name = default_prompt_name
        if default_prompt_name:
            self._prompt(None, None)  # raises an error if the default prompt does not exist
        self._no_workers_seconds = options.pop("no_workers_seconds", 60.0)
        settings = _settings(options)
        if settings.redis_url:
            self.client = Client(settings=settings, no_workers_seconds=self._no_workers_seconds)
        else:
            self.client = Client._shared(settings)
        self._spec: dict[str, Any] = {}
        self._asked_labels, self._found_labels = labels["num_labels"], 0
        self._files: dict[str, tuple[Any, str]] = {}
        self.activation_fn = activation_fn

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections to the server. Workers that this process has started end when no other object
        uses them.
        """
        self.client.close()

    @overload
    def predict(
        self,
        inputs: tuple[str, str] | list[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        *,
        convert_to_numpy: Literal[True] = True,
        convert_to_tensor: Literal[False] = False,
        **others: Any,
    ) -> np.float32 | npt.NDArray[np.float32]: ...

    @overload
    def predict(
        self,
        inputs: Pairs | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        *,
        convert_to_numpy: Literal[True] = True,
        convert_to_tensor: Literal[False] = False,
        **others: Any,
    ) -> npt.NDArray[np.float32]: ...

    @overload
    def predict(
        self, inputs: Pairs | None = None, *, convert_to_numpy: Literal[False], **others: Any
    ) -> list[Any]: ...

    @overload
    def predict(self, inputs: Pairs | None = None, *, convert_to_tensor: bool, **others: Any) -> Any: ...

    def predict(
        self,
        inputs: Any = None,
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
        **older: Any,
    ) -> Any:
        """Score pairs.

        Parameters
        ----------
        inputs
            Pairs of texts, or one pair. Or a table with the columns ``query`` and ``passage``, of any kind
            that `Client.submit` takes. The older name is ``sentences``.
        prompt_name, prompt
            The prompt, by name or as text. The default is the constructor's prompt; if it has none, the
            model's own.
        show_progress_bar
            Whether to show progress, in Jupyter or on standard error.
        activation_fn
            Function that turns logits into scores; by default the constructor's. The older name is
            ``activation_fct``.
        convert_to_numpy, convert_to_tensor
            These say whether the result is an array (the default), a tensor, or a list of tensors.
        apply_softmax
            For a model with several outputs: whether the scores of a pair are normalized to add up to 1.
        batch_size, device, pool, chunk_size
            These have no effect.
        older
            Arguments by their older names. Also ``num_workers``, which has no effect.

        Returns
        -------
        float32 scores of shape ``[n]``. For a model with several outputs, the shape is ``[n, labels]``,
        unless ``label`` names one output. The result for one pair does not have the dimension ``n``.

        Raises
        ------
        ConfigError
            An argument is refused, a prompt's name is unknown, or the model has another number of outputs
            than ``num_labels``.
        InputError
            An input is not a pair of texts.
        RunFailed
            The run failed, or a pair has no score; the message says why.
        NoWorkers
            No worker listens on the queue.
        """
        inputs = _older(older, inputs, "sentences")
        activation_fn = _older(older, activation_fn, "activation_fct")
        _refuse_entries("predict", older, {"num_workers"}, _OF_CALLS)
        if inputs is None:
            raise InputError("inputs are None; give pairs of texts")
        is_one = _is_pair(inputs)
        pairs = [tuple(inputs)] if is_one else inputs
        scores = self._scores(pairs, self._prompt(prompt, prompt_name), activation_fn, show_progress_bar)
        if apply_softmax and scores.ndim > 1:
            powers = np.exp(scores - scores.max(axis=1, keepdims=True))
            scores = powers / powers.sum(axis=1, keepdims=True)
        if convert_to_tensor or not convert_to_numpy:
            tensor = _torch().from_numpy(scores)
            result = tensor if convert_to_tensor else list(tensor)
        else:
            result = scores
        return result[0] if is_one else result

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
        **older: Any,
    ) -> list[dict[str, Any]]:
        """Order `documents` by their scores for `query`, best first. Other parameters are as in `predict`.

        Returns
        -------
        At most `top_k` dicts ``{"corpus_id": index, "score": score}``; by default one for each document. With
        `return_documents`, a dict also has the document as ``"text"``.

        Raises
        ------
        ConfigError
            An argument is refused, or the model gives a document several scores.
        InputError, RunFailed, NoWorkers
            As in `predict`.
        """
        check_top_k(top_k)
        if isinstance(documents, str):  # each character would be scored as a document
            raise InputError(f"documents are one string, {documents!r:.80}; give a list of them")
        documents = list(documents)  # a series of pandas finds a document by its label, not by its place
        activation_fn = _older(older, activation_fn, "activation_fct")
        _refuse_entries("rank", older, _OLDER_OF_RANK, _OF_CALLS)
        scores = self.predict(
            [(query, document) for document in documents],
            prompt_name,
            prompt,
            show_progress_bar=show_progress_bar,
            activation_fn=activation_fn,
        )
        if scores.ndim > 1:
            raise ConfigError(
                "documents are ranked by one score, and the model has several; name one (label=)"
            )
        best = np.argsort(-scores, kind="stable")[:top_k].tolist()
        return [
            {"corpus_id": index, "score": float(scores[index])}
            | ({"text": documents[index]} if return_documents else {})
            for index in best
        ]

    @property
    def num_labels(self) -> int:
        """Number of scores that the model gives to a pair. To find this number, the object scores one pair if
        it has not scored anything yet.
        """
        if not self._found_labels:
            self._scores([("a", "b")], None, None, show_progress=False)
        return self._found_labels

    @property
    def max_length(self) -> Any:
        """The largest number of tokens of a pair, also called ``max_seq_length``. Assign ``None`` to use the
        model's own limit.

        If no limit is set, reading this attribute returns the model's own limit. For that, transformers loads
        the tokenizer; the errors are those of `tokenizer`.
        """
        length = self._spec.get("max_length", self.client.settings.max_length)
        return int(length or self.tokenizer.model_max_length)

    @max_length.setter
    def max_length(self, value: Any) -> None:
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(
                f"max_length is {value!r}; give a number of tokens, or None for the model's limit"
            )
        self._spec["max_length"] = value

    max_seq_length = max_length

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, which transformers loads in this process. Scoring is refused if the caller
        changes the tokenizer, because workers do not see the change.

        Raises
        ------
        ConfigError
            transformers is not installed, or the model's files are not on this host.
        """
        if "tokenizer" not in self._files:
            tokenizer = self._load("AutoTokenizer")
            positions = getattr(self.config, "max_position_embeddings", None) or 0
            if positions > 0:
                tokenizer.model_max_length = min(tokenizer.model_max_length, positions)
            self._files["tokenizer"] = tokenizer, _state(tokenizer)
        return self._files["tokenizer"][0]

    @property
    def config(self) -> Any:
        """The model's config, which transformers loads in this process; errors are as for `tokenizer`."""
        if "config" not in self._files:
            config = self._load("AutoConfig")
            self._files["config"] = config, _state(config)
        return self._files["config"][0]

    @property
    def device(self) -> Any:
        """The device of tensors in results, which is ``torch.device("cpu")``."""
        return _torch().device("cpu")

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Set the precision if a dtype is given; devices are ignored, because workers choose them."""
        for argument in (*args, *kwargs.values()):
            if str(argument).startswith("torch."):
                self._spec |= _precision_of({"dtype": argument})
        return self

    def cuda(self, device: object = None) -> Self:
        """Do nothing, because workers choose the device."""
        return self

    def cpu(self) -> Self:
        """Do nothing, because workers choose the device."""
        return self

    def eval(self) -> Self:
        """Do nothing, because workers only evaluate."""
        return self

    def train(self, mode: bool = True) -> Self:
        """Refuse to train; raises `ConfigError` unless `mode` is false."""
        if mode:
            raise ConfigError("train: workers only score; train with sentence_transformers.CrossEncoder")
        return self

    def float(self) -> Self:
        """Score in fp32 from now on."""
        return self.to("torch.float32")

    def half(self) -> Self:
        """Score in fp16 from now on."""
        return self.to("torch.float16")

    def bfloat16(self) -> Self:
        """Score in bf16 from now on."""
        return self.to("torch.bfloat16")

    def start_multi_process_pool(self, target_devices: object = None) -> dict[str, Any]:
        """Return a pool without processes. Processes are not needed here, because workers score the pairs."""
        return {"input": None, "output": None, "processes": []}

    def stop_multi_process_pool(self, pool: object) -> None:
        """Do nothing, because no process was started."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _ASSIGNED and not name.startswith("_"):
            raise ConfigError(
                f"{name} cannot be assigned: workers have the model, and would not see it; "
                f"only {', '.join(sorted(_ASSIGNED - {'client'}))} can be assigned"
            )
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"rankmill.CrossEncoder has no {name}: workers have the model; "
            "sentence_transformers.CrossEncoder loads it here"
        )

    def __reduce__(self) -> Any:
        """Pickle the object. A copy in another process uses the same server, so that process must be able to
        reach the server.
        """
        settings = self.client.settings.model_copy(update={"redis_url": self.client.url})
        kept = {name: value for name, value in vars(self).items() if name not in ("client", "_files")}
        kept |= {"_spec": dict(self._spec), "prompts": dict(self.prompts)}
        return _restored, (settings, kept)

    def _load(self, kind: str) -> Any:
        settings = self.client.settings
        name = str(shipped("examples", "demo-model")) if settings.model == "demo" else settings.model
        of_hub = {} if Path(name).is_dir() else {"revision": settings.revision or "main"}
        try:
            return getattr(import_module("transformers"), kind).from_pretrained(name, **of_hub)
        except ImportError:
            raise ConfigError(f"{kind} needs transformers here: pip install transformers") from None
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"the files of model {name} are not here, only where workers run ({reason})"
            ) from None

    def _check_unchanged(self) -> None:
        for name, (loaded, before) in self._files.items():
            if _state(loaded) != before:
                raise ConfigError(
                    f"{name} was changed, and workers would not see it: they read the model's own files; set "
                    "max_length, or make a new CrossEncoder with processor_kwargs={'truncation_side': ...}"
                )

    def _scores(
        self,
        pairs: Any,
        prompt: str | None,
        activation_fn: Callable[[Any], Any] | None,
        show_progress: bool | None,
    ) -> npt.NDArray[np.float32]:
        self._check_unchanged()
        if isinstance(pairs, list) and not pairs:
            return np.zeros(0, np.float32)
        function = activation_fn or self.activation_fn
        activation = _activation_name(function)
        spec = dict(self._spec)
        if function is not None:
            spec["activation"] = activation or "identity"
        if prompt is not None:
            spec["instruction"] = prompt
        scored = self.client.score(pairs, show_progress=bool(show_progress), **spec)
        if scored.errors:
            row, reason = next(iter(scored.errors.items()))
            raise RunFailed(
                f"{len(scored.errors):,} of {len(scored):,} pairs have no score; pair {row}: {reason}"
            )
        scores = np.asarray(scored, np.float32)
        self._found_labels = outputs = len(scored.labels) or 1
        if self.client.settings.all_labels and self._asked_labels not in (None, outputs):
            raise ConfigError(
                f"num_labels is {self._asked_labels}, and model {self.client.settings.model} has {outputs}: "
                "leave num_labels out, because another head would be random"
            )
        if function and not activation:
            logits = _torch().from_numpy(scores.reshape(len(scores), -1))
            scores = np.asarray(function(logits), np.float32).reshape(scores.shape)
        return scores

    def _prompt(self, prompt: str | None, name: str | None) -> str | None:
        """Return the prompt to put before each query, or ``None`` for the model's own prompt.

        If `prompt` is not given, the prompt called `name` is returned; without a `name`, the default prompt.
        Raises `ConfigError` for an unknown name. It is also an error if prompts were given, but neither
        `name` nor a default says which one to use.
        """
        name = name or self.default_prompt_name
        if prompt is not None:
            return prompt
        if name is None and self.prompts:
            raise ConfigError(
                "prompts are given, and none is named, but the model's own default may have the name of one: "
                "set default_prompt_name, or give prompt_name or prompt"
            )
        if name is None:
            return None
        if name not in self.prompts:
            names = ", ".join(map(repr, self.prompts)) or "none"
            raise ConfigError(f"no prompt {name!r}; there are {names} (prompts=), or give its text as prompt")
        return self.prompts[name]


def _restored(settings: Settings, kept: dict[str, Any]) -> CrossEncoder:
    model = CrossEncoder.__new__(CrossEncoder)
    model.client = Client(settings=settings, no_workers_seconds=kept["_no_workers_seconds"])
    vars(model).update(kept, _files={})
    return model


def _settings(options: Mapping[str, Any]) -> Settings:
    """Load the settings of a `CrossEncoder`, with the values in `options`. The precision is fp32 unless the
    settings name another. Each row gets the scores of all labels, unless ``label`` is set or ``long`` is
    ``split``.
    """
    is_named = merge_settings(options)["precision"].source != BASE.name
    settings = validate(merge_settings(options if is_named else {**options, "precision": "fp32"}))
    has_one_score = settings.label is not None or settings.long == "split"
    return settings if has_one_score else settings.model_copy(update={"all_labels": True})


def _older(options: dict[str, Any], value: Any, *names: str) -> Any:
    """Return the `value` of an argument, which the caller may have given under an older name.

    The older names are `names`; the one that was used is removed from `options`. Raises `ConfigError` if the
    argument is given under two names.
    """
    for name in names:
        if name in options:
            if value is not None:
                raise ConfigError(f"{name} is the older name of an argument that is given, too: leave it out")
            value = options.pop(name)
    return value


def _refuse_arguments(options: dict[str, Any], model: str) -> None:
    """Remove from `options` the arguments of sentence-transformers' class that have no effect here. Raises
    `ConfigError` for arguments that cannot be obeyed.
    """
    is_here = model == "demo" or Path(model).is_dir()
    options.pop("model_card_data", None)
    for name in _REFUSED.keys() & options.keys():
        value = options.pop(name)
        nothing = value is None or value is False or value == [] or (name == "token" and value is True)
        if not nothing and not (name == "local_files_only" and is_here):
            raise ConfigError(f"{name}: {_REFUSED[name]}")


def _refuse_entries(name: str, given: Mapping[str, Any], allowed: Iterable[str], reason: str) -> None:
    for entry in given.keys() - set(allowed):
        raise ConfigError(f"{name}: {entry} is refused: {reason}")


def _precision_of(model_kwargs: Mapping[str, Any]) -> dict[str, str]:
    dtypes = {"dtype", "torch_dtype"} & model_kwargs.keys()
    reason = "workers load the model, in any precision and as fits their device"
    _refuse_entries("model_kwargs", model_kwargs, dtypes | _MODEL, reason)
    names = {str(model_kwargs[key]).removeprefix("torch.") for key in dtypes}
    for name in names - _PRECISIONS.keys():
        raise ConfigError(
            f"dtype is {name}; give {', '.join(_PRECISIONS)}, or another precision by precision="
        )
    if len(names) > 1:
        raise ConfigError("model_kwargs: dtype and torch_dtype differ; give one of them")
    return {"precision": _PRECISIONS[names.pop()]} if names else {}


def _lengths_of(processor_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    options = {"model_max_length": "max_length", "truncation_side": "truncation_side"}
    reason = "workers have the tokenizer that the model's files describe"
    _refuse_entries("processor_kwargs", processor_kwargs, options.keys() | _PROCESSOR, reason)
    return {options[name]: value for name, value in processor_kwargs.items() if name in options}


def _activation_name(function: Callable[[Any], Any] | None) -> str | None:
    kind = type(function)
    return _KNOWN_ACTIVATIONS.get(kind.__name__) if kind.__module__.startswith("torch.nn.") else None


def _state(loaded: Any) -> str:
    """Return a text that describes a loaded tokenizer or config. If the text differs from an earlier text,
    the object was changed. Some changes do not show in the text.
    """
    return f"{loaded!r} {getattr(loaded, 'chat_template', None)!r}"


def _is_pair(inputs: Any) -> bool:
    """Whether `inputs` looks like one pair, and not like a list of pairs. Its length is not checked."""
    if isinstance(inputs, np.ndarray):
        return inputs.size > 0 and inputs.ndim < 2 and inputs.dtype.names is None
    return isinstance(inputs, list | tuple) and len(inputs) > 0 and isinstance(inputs[0], str)


def _torch() -> Any:
    try:
        return import_module("torch")
    except ImportError:
        raise ConfigError("tensors need torch, which is not installed here; use convert_to_numpy") from None
