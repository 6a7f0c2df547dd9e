"""Reads how a model is applied to a pair, from the files that sentence-transformers and transformers save."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from rankmill.jobs.contract.errors import SpecError, WorkerError
from rankmill.workers.host.disk_cache import version
from rankmill.workers.host.model_file import read_json

Task = Literal["classifier", "chain", "causal"]
"""Kinds of models: a sequence classifier of transformers (``classifier``), a model without a head that has
modules after it (``chain``), or a language model (``causal``).
"""

_TASKS: dict[str, Task] = {
    "sequence-classification": "classifier",
    "feature-extraction": "chain",
    "text-generation": "causal",
}
_CHAIN = "feature-extraction"
_INTO = {"classifier": "scores", "chain": "token_embeddings", "causal": "causal_logits"}
"""The name that sentence-transformers gives to the transformer's output, by the kind of the model."""

_OUTPUTS = {"classifier": "logits", "chain": "last_hidden_state", "causal": "logits"}
_KNOWN = frozenset({"Dense", "Dropout", "LayerNorm", "LogitScore", "Normalize", "Pooling"})
_FOLLOWED = frozenset(
    {"transformer_task", "modality_config", "module_output_name", "processing_kwargs", "max_seq_length"}
    | {"unpad_inputs", "query_length", "document_length"}  # these have no effect on the scores of pairs
)
"""Settings of sentence-transformers' module Transformer that rankmill follows or may ignore. A model with any
other setting of this module is refused.
"""


class SavedModule(BaseModel, frozen=True, extra="forbid"):
    """A module, such as a pooling layer, that sentence-transformers runs after the transformer."""

    kind: str
    path: str
    config: dict[str, Any]


class ModelLayout(BaseModel, frozen=True, extra="forbid"):
    """How a model is applied to a pair: the kind of the model, the modules that follow it, prompts, chat
    template and length limit.

    Attributes
    ----------
    task
        The kind of the model.
    steps
        The modules after the transformer. A language model that was saved as a cross-encoder has one module,
        which names the tokens of its answers, such as "yes" and "no".
    activation
        Dotted path of the activation function that the model was saved with.
    prompts, default_prompt
        The model's own prompts, and the name of the prompt to use.
    saved
        Whether sentence-transformers saved the model as a cross-encoder. If so, the model's files say
        everything about how the model is applied to a pair.
    chat
        Whether the two texts go through the chat template; ``None`` if the files do not say.
    chat_format
        Format of messages: ``flat``, ``structured`` or ``auto``.
    chat_options
        Variables of the chat template.
    max_length
        A pair may have at most this many tokens; ``None`` if the files set no limit.
    """

    task: Task
    steps: tuple[SavedModule, ...] = ()
    activation: str | None = None
    prompts: dict[str, str] = {}
    default_prompt: str | None = None
    saved: bool = False
    chat: bool | None = None
    chat_format: str = "auto"
    chat_options: dict[str, Any] = {}
    max_length: int | None = None

    @property
    def prompt(self) -> str:
        return self.prompts.get(self.default_prompt or "") or ""


PLAIN = ModelLayout(task="classifier")
"""The layout of a plain sequence classifier: it has no modules after it, and no prompt, activation or length
limit of its own.
"""


def read_layout(source: str | Path, revision: str | None, config: Any) -> ModelLayout:
    """Read from a model's files how it is applied to a pair, as `sentence_transformers.CrossEncoder` does.

    Parameters
    ----------
    source, revision
        Directory or hub id, and the commit on the hub or the digest of the directory's content.
    config
        The model's config, from transformers.

    Raises
    ------
    SpecError
        The model has parts or settings that rankmill does not support.
    """
    modules = read_json(source, revision, "modules.json", list)
    saved = read_json(source, revision, "config_sentence_transformers.json", dict) or {}
    entry = getattr(config, "sentence_transformers", None) or {}
    older = entry.get("activation_fn", getattr(config, "sbert_ce_default_activation_function", None)) or None
    # Without modules.json, sentence-transformers ignores config_sentence_transformers.json too.
    if modules is None or saved.get("model_type") != "CrossEncoder":
        first = (getattr(config, "architectures", None) or [""])[0]
        if first.endswith("ForTokenClassification"):  # without this, it could load as a sequence classifier
            raise SpecError(f"model {source} is a {first}, which labels tokens: it is not a cross-encoder")
        return ModelLayout(task="causal" if first.endswith("ForCausalLM") else "classifier", activation=older)
    return _saved(source, revision, modules, saved, older)


_LONGEST_PROMPT = 1 << 14
"""A model's own prompt may have at most this many characters, because it is added to every row."""

_LABELS = re.compile("^(num_labels|id2label|label2id)$")
"""Matches the names of entries in a model's config that say how many outputs the model has."""

_REPEATED = re.compile(
    r"(^|_)(layers?|groups?|blocks?|depths?|stages?|experts|attention_types|block_sizes|inner_group_num"
    r"|hashes|chunks_before|chunks_after)$"
)
"""Matches entries that say how often a part of the model, such as a layer, is repeated."""

_WIDE = re.compile(r"(^|_)(attention_window|chunk_length|block_size|buckets)$")
"""Matches entries, such as ``chunk_length``, that may make each token cost more."""

_LIMITS = (_LABELS, 1 << 14), (_REPEATED, 1000), (_WIDE, 1 << 14)
"""Patterns for names of entries in a model's config, each with the largest value that such an entry may have.
"""


def check_counts(source: str | Path, config: Any, name: str = "") -> None:
    """Refuse a model's config with huge numbers of layers, labels or other parts, before transformers
    allocates memory for them.

    Raises
    ------
    SpecError
        The config has too many labels, layers or other parts.
    """
    entries = config.items() if isinstance(config, dict) else [(name, item) for item in config or ()]
    for entry, value in entries:
        count = len(value or ()) if entry in {"id2label", "label2id"} else value
        if isinstance(count, dict | list):
            check_counts(source, count, entry)
        elif isinstance(count, int) and not isinstance(count, bool):
            most = next((most for names, most in _LIMITS if names.search(entry)), count)
            noun = "layers" if "layer" in entry else "labels" if "label" in entry else "parts"
            if count > most:
                raise SpecError(
                    f"model {source} has {count:,} {noun} in its config.json ({entry}), but at most "
                    f"{most:,} are allowed"
                )


def _saved(
    source: str | Path, revision: str | None, modules: list[Any], saved: dict[str, Any], older: str | None
) -> ModelLayout:
    _check_versions(source, saved.get("requirements") or {})
    types = [str(module["type"]) for module in modules]
    # A class of another package, or of the model's repository, is not taken for one of the same name.
    kinds = [kind.rpartition(".")[2] if kind.startswith("sentence_transformers.") else kind for kind in types]
    if kinds[:1] != ["Transformer"] or modules[0]["path"] or not _KNOWN.issuperset(kinds[1:]):
        raise SpecError(
            f"model {source} has modules that only sentence-transformers runs ({', '.join(kinds)}): use a "
            f"model that is a Transformer in the top folder, and after it {', '.join(sorted(_KNOWN))}"
        )
    settings = read_json(source, revision, "sentence_bert_config.json", dict) or {}
    task = _TASKS.get(settings.get("transformer_task", _CHAIN))
    text = settings.get("modality_config", {"text": {}})
    message = text.get("message", {})
    _check_transformer(source, task, settings, text)
    assert task
    steps = []
    for kind, module in zip(kinds[1:], modules[1:], strict=True):
        module_config = read_json(source, revision, f"{module['path']}/config.json", dict)
        if kind == "Dense":
            check_counts(source, {"num_labels": (module_config or {}).get("out_features")})
        if kind != "Dropout":
            steps.append(SavedModule(kind=kind, path=str(module["path"]), config=module_config or {}))
    after = [step.kind for step in steps]
    if (task == "causal") != (after == ["LogitScore"]) or (task == "classifier" and after):
        raise SpecError(
            f"model {source} has a transformer for {settings.get('transformer_task', _CHAIN)} with "
            f"{', '.join(after) or 'nothing'} after it, which rankmill does not run: after a language model "
            "comes a LogitScore, and after a sequence classifier nothing"
        )
    prompts = {name: text or "" for name, text in (saved.get("prompts") or {}).items()}
    if any(len(text) > _LONGEST_PROMPT for text in prompts.values()):
        raise SpecError(f"model {source} has a prompt of more than {_LONGEST_PROMPT:,} characters")
    if task == "chain" and not steps:
        raise SpecError(f"model {source} has no modules that make a score: its modules.json ends too soon")
    return ModelLayout(
        task=task,
        steps=tuple(steps),
        activation=older if saved.get("activation_fn") is None else str(saved["activation_fn"]),
        prompts=prompts,
        default_prompt=saved.get("default_prompt_name"),
        saved=True,
        chat="message" in text,
        chat_format=message.get("format", "auto"),
        chat_options=(settings.get("processing_kwargs") or {}).get("chat_template", {}),
        max_length=settings.get("max_seq_length"),
    )


def _check_versions(source: str | Path, requirements: dict[str, Any]) -> None:
    """Raise `WorkerError` if a package that computes the scores here does not have the version that a
    model's files ask for.
    """
    from packaging.specifiers import SpecifierSet

    for package in ("torch", "transformers", "tokenizers"):
        wanted = requirements.get(package)
        wanted = wanted.get("specifier") if isinstance(wanted, dict) else wanted
        if wanted and not SpecifierSet(str(wanted), prereleases=True).contains(here := version(package)):
            raise WorkerError(f"model {source} asks for {package} {wanted}, and this worker has {here}")


def _check_transformer(
    source: str | Path, task: Task | None, settings: dict[str, Any], text: dict[str, Any]
) -> None:
    """Refuse settings of sentence-transformers' module Transformer that change its input or output in an
    unknown way.
    """
    if task is None:
        kind = settings["transformer_task"]
        raise SpecError(
            f"model {source} is for {kind}, which rankmill does not run; it runs {', '.join(_TASKS)}"
        )
    options = settings.get("processing_kwargs") or {}
    unknown = [name for name in options if name != "chat_template"]
    unknown += [name for name in settings if name not in _FOLLOWED and settings[name]]
    unknown += [name for name in ("text", "message") if _unusual(text.get(name, {}), _OUTPUTS[task])]
    if settings.get("module_output_name", _INTO[task]) != _INTO[task]:
        unknown.append("module_output_name")
    if {"padding", "truncation", "max_length", "return_tensors", "restore_suffix"} & {
        *options.get("chat_template", {})
    }:
        unknown.append("chat_template")
    if unknown:
        raise SpecError(
            f"model {source} sets {', '.join(unknown)} in sentence_bert_config.json, which rankmill does not "
            "follow: its scores would be wrong"
        )


def _unusual(entry: dict[str, Any], output: str) -> bool:
    called = entry.get("method", "forward"), entry.get("method_output_name", output)
    return called != ("forward", output)
