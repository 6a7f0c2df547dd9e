"""Caches a model's config, tokenizer and layout on disk, for workers without transformers.

Importing torch and transformers takes most of a worker's start, and a worker that runs a cached graph needs
neither.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from tokenizers import Encoding, Tokenizer
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import ByteLevel

from rankmill.jobs.contract.errors import SpecError
from rankmill.jobs.system import system
from rankmill.workers.backends.auto import backends
from rankmill.workers.backends.families import TRACEABLE
from rankmill.workers.batches.layout import ModelLayout, read_layout
from rankmill.workers.host.disk_cache import build_once, cache_name, is_kept, kept_as, version
from rankmill.workers.host.model_file import model_file, read_json
from rankmill.workers.models.tokenizer import Joiner

_VERSION = 8
"""Version of the format of the files in which a model's description is cached. A change of the format must
increase this version.
"""

_FACTS, _TOKENIZER = "facts.json", "tokenizer.json"

logger = logging.getLogger(__name__)


class KnownConfig(BaseModel, frozen=True, extra="forbid", protected_namespaces=()):
    """The fields of a transformers config that rankmill uses, under the same names."""

    model_type: str
    hidden_size: int | None = None
    intermediate_size: int | None = None
    hidden_dim: int | None = None
    max_position_embeddings: int | None = None
    rope_parameters: dict[str, Any] | None = None
    pad_token_id: int | None = None
    classifier_pooling: str | None = None
    num_labels: int
    id2label: dict[int, str]
    problem_type: str | None = None

    def __getattr__(self, name: str) -> Any:
        """Raise `KeyError` for a missing field, because `getattr` with a default would hide `AttributeError`:
        a model would then be scored in another way once its description is in the cache.
        """
        if name.startswith("_"):
            raise AttributeError(name)
        raise KeyError(f"KnownConfig lacks the field {name}")


class TokenizerFacts(BaseModel, frozen=True, extra="forbid", protected_namespaces=()):
    """Attributes of a tokenizer that transformers keeps outside of the tokenizer's own file."""

    model_max_length: int
    pad_token_id: int | None
    all_special_tokens: tuple[str, ...]
    model_input_names: tuple[str, ...]


class _Facts(BaseModel, frozen=True, extra="forbid", protected_namespaces=()):
    """What is cached of a `Description`, whose attributes have the same names."""

    config: KnownConfig
    layout: ModelLayout
    tokenizer: TokenizerFacts


@dataclass(frozen=True)
class Description:
    """A model's config, its tokenizer, and how the model is applied to texts.

    Attributes
    ----------
    config, tokenizer, layout
        Config and tokenizer, from transformers or from the cache, and how the model is applied.
    is_language_model
        Whether the model is a language model, in which a token sees only earlier tokens. A language model
        reads a pair within a prompt.
    cache
        Folder in which facts about the tokenizer are kept; ``None`` if they are not kept.
    copy
        Digest of the description's cached files; empty if the description is not cached.
    lock
        A thread must hold this lock while it tokenizes. A tokenizer of transformers keeps its limit of length
        as state, and two threads use it: the forward's thread scores probes while the main thread prepares
        chunks.
    """

    config: Any
    tokenizer: Any
    layout: ModelLayout
    is_language_model: bool = False
    cache: Path | None = None
    copy: str = ""
    lock: threading.RLock = field(default_factory=system.RLock, compare=False)

    @property
    def labels(self) -> tuple[str, ...]:
        if self.layout.task == "classifier":
            names = getattr(self.config, "id2label", None) or {}
            return tuple(str(names.get(number, number)) for number in range(self.config.num_labels))
        last = [
            step.config for step in self.layout.steps if step.config.get("module_output_name") == "scores"
        ]
        return tuple(map(str, range(int(last[-1]["out_features"]) if last else 1)))

    @cached_property
    def joiner(self) -> Joiner | None:
        """Tokenizes each distinct text of pairs only once; ``None`` if that would change the tokens."""
        return Joiner.of(self.tokenizer, self.cache)

    @cached_property
    def joiner_alone(self) -> Joiner | None:
        """Like `joiner`, for texts that are scored by themselves."""
        return Joiner.of(self.tokenizer, self.cache, alone=True)

    @property
    def plain(self) -> bool:
        """Whether the model is a sequence classifier of transformers with one output."""
        return self.layout.task == "classifier" and self.config.num_labels == 1


class PlainTokenizer:
    """A Rust tokenizer that is called as transformers' tokenizers are, without importing transformers.

    Parameters
    ----------
    text
        The tokenizer's JSON.
    facts
        The properties that transformers keeps outside of the JSON.
    """

    split_special_tokens = False
    truncation_side = "right"  # `_plain` refuses a tokenizer that cuts on the left

    def __init__(self, text: str, facts: TokenizerFacts) -> None:
        self.backend_tokenizer = Tokenizer.from_str(text)
        self.backend_tokenizer.no_padding()
        self.model_max_length = facts.model_max_length
        self.pad_token_id = facts.pad_token_id
        self.all_special_tokens = list(facts.all_special_tokens)
        self._has_types = "token_type_ids" in facts.model_input_names

    def __call__(
        self,
        queries: Sequence[str],
        passages: Sequence[str] | None = None,
        *,
        truncation: str | None = None,
        max_length: int = 0,
        **_: Any,
    ) -> Encoded:
        """Tokenize pairs ``[n]``, or single texts ``[n]``; texts are cut only if `truncation` is given."""
        if truncation is None:
            self.backend_tokenizer.no_truncation()
        else:
            side = self.truncation_side
            self.backend_tokenizer.enable_truncation(max_length, strategy=truncation, direction=side)
        rows: Any = list(queries) if passages is None else list(zip(queries, passages, strict=True))
        return Encoded(self.backend_tokenizer.encode_batch(rows), self._has_types)


class Encoded(dict[str, list[list[int]]]):
    """Token ids of rows and, if the model has them, token types, under transformers' names."""

    def __init__(self, encodings: list[Encoding], has_types: bool) -> None:
        super().__init__(input_ids=[encoding.ids for encoding in encodings])
        if has_types:
            self["token_type_ids"] = [encoding.type_ids for encoding in encodings]
        self.encodings = encodings


def describe(
    source: str | Path, revision: str | None, cache: Path, check_unchanged: Callable[[], None] = lambda: None
) -> Description:
    """Describe a model from the cache, or else with transformers, and then cache the description if possible.

    Parameters
    ----------
    source, revision, check_unchanged
        As in `rankmill.workers.backends.base.ModelFiles`.
    cache
        Cache folder; if it is not writable, every worker imports transformers.

    Raises
    ------
    SpecError
        The model is not a cross-encoder that rankmill supports.
    WorkerError
        As in `is_kept`.
    OSError, ValueError
        From transformers, if the model does not exist.
    """
    packages = (version(name) for name in ("rankmill", "transformers", "tokenizers"))
    folder = cache / "models" / cache_name(source, revision, str(_VERSION), *packages)
    if is_kept(folder, cache):
        return _load(folder, cache)
    description = read(source, revision, cache)
    chat = getattr(description.tokenizer, "chat_template", None)
    if description.config.model_type not in TRACEABLE or not description.plain or chat:
        return description  # not cached: running this model imports transformers anyway
    try:
        text = _plain(description.tokenizer, source, revision)
        if text is not None:
            # raises if the model's files have changed: the cached folder's name is made from the old files
            check_unchanged()
            facts = _Facts.model_validate(description, from_attributes=True)
            build_once(folder, partial(_save, facts, text))
            return _load(folder, cache)  # the cached copy, so that this worker proves what later workers load
    except Exception as error:  # for example, the tokenizer is unusual, or the disk is full
        logger.warning("cannot cache what %s needs, so workers import transformers: %s", source, error)
    return description


def read(source: str | Path, revision: str | None, cache: Path | None = None) -> Description:
    """Read a model's config, tokenizer and layout with transformers, whose import takes seconds."""
    from rankmill.workers.backends.classifier import is_language_model, load_config

    for kind in backends().values():
        kind.register()
    config = load_config(source, revision)
    layout = read_layout(source, revision, config)
    if code := _tokenizer_code(source, revision):
        raise SpecError(
            f"model {source} has a tokenizer that transformers does not have ({code} in its "
            "tokenizer_config.json), and code from model repositories is never run"
        )
    tokenizer = load_tokenizer(source, revision)
    # transformers makes a tokenizer even if the tokenizer's files are missing
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        raise SpecError(f"the tokenizer in {source} knows no words: are its files missing?")
    most = getattr(config.get_text_config(), "vocab_size", None)
    if most and (last := max(_words(tokenizer), default=0)) >= most:
        raise SpecError(
            f"the tokenizer in {source} is another model's: its words have numbers up to {last:,}, and the "
            f"model has {most:,} embeddings"
        )
    causal = layout.task == "causal" or is_language_model(config)
    return Description(config, tokenizer, layout, causal, cache)


def load_tokenizer(source: str | Path, revision: str | None) -> Any:
    """Load the tokenizer of a model, with the parts that its ``tokenizer.json`` describes.

    For many classes of tokenizers, transformers reads only the vocabulary from this file, and makes the usual
    other parts of the class. With those, the model would get other tokens than in its training.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer = AutoTokenizer.from_pretrained(source, revision=revision or "main", trust_remote_code=False)
    file = model_file(source, revision, _TOKENIZER)
    if file is None or not tokenizer.is_fast or type(tokenizer) is PreTrainedTokenizerFast:
        return tokenizer
    saved = json.loads(file.read_text(encoding="utf-8"))
    parts, made = Tokenizer.from_str(json.dumps({**saved, **_NO_WORDS})), tokenizer.backend_tokenizer
    for name in ("normalizer", "pre_tokenizer"):
        part = getattr(parts, name)
        if not (isinstance(part, _BY_CONFIG) and isinstance(getattr(made, name), type(part))):
            setattr(made, name, part)
    model = {name: value for name, value in saved["model"].items() if name not in ("vocab", "merges")}
    if model.pop("type", None) != type(made.model).__name__ or any(
        getattr(made.model, name, value) != value for name, value in model.items()
    ):
        made.model = Tokenizer.from_file(str(file)).model
    return tokenizer


_NO_WORDS: dict[str, Any] = {
    "added_tokens": [],
    "post_processor": None,
    "decoder": None,
    "model": {"type": "BPE", "vocab": {}, "merges": []},
}
"""Entries of a ``tokenizer.json`` without words, because reading a large vocabulary takes a second."""

_BY_CONFIG = BertNormalizer, ByteLevel
"""Parts of a tokenizer that ``tokenizer_config.json`` may change, as in ``do_lower_case``."""


def _tokenizer_code(source: str | Path, revision: str | None) -> str | None:
    """Return the name of the tokenizer class whose code is in a model's repository, or ``None``.

    The result is ``None`` if there is no such class, or if transformers has a class of this name. Otherwise
    transformers would use another tokenizer, because it runs no code from repositories here.
    """
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    code = (read_json(source, revision, "tokenizer_config.json", dict) or {}).get("auto_map")
    named = code.get("AutoTokenizer") if isinstance(code, dict) else code
    classes = [named] if isinstance(named, str) else [str(name) for name in named or () if name]
    if any(tokenizer_class_from_name(name.rpartition(".")[2]) for name in classes):
        return None
    return classes[0] if classes else None


def _words(tokenizer: Any) -> Iterable[int]:
    added = tokenizer.added_tokens_encoder
    return (number for word, number in tokenizer.get_vocab().items() if word not in added)


def _load(folder: Path, cache: Path) -> Description:
    facts = _Facts.model_validate_json((folder / _FACTS).read_text(encoding="utf-8"))
    tokenizer = PlainTokenizer((folder / _TOKENIZER).read_text(encoding="utf-8"), facts.tokenizer)
    return Description(facts.config, tokenizer, facts.layout, cache=cache, copy=kept_as(folder))


def _save(facts: _Facts, text: str, folder: Path) -> None:
    (folder / _FACTS).write_text(facts.model_dump_json(indent=1), encoding="utf-8")
    (folder / _TOKENIZER).write_text(text, encoding="utf-8")


def _plain(tokenizer: Any, source: str | Path, revision: str | None) -> str | None:
    """Return JSON with which a `PlainTokenizer` gives the same tokens as `tokenizer`, or ``None`` if there is
    no such JSON.
    """
    if not tokenizer.is_fast or tokenizer.truncation_side != "right" or tokenizer.split_special_tokens:
        return None
    own = _state(tokenizer.backend_tokenizer)
    text = json.dumps(own)
    if own["model"].get("type") == "Unigram":  # in `own`, a Unigram model's scores have lost their last digit
        file = model_file(source, revision, _TOKENIZER)
        text = file.read_text(encoding="utf-8") if file else ""
    return text if text and _state(Tokenizer.from_str(text)) == own else None


def _state(backend: Tokenizer) -> dict[str, Any]:
    """The tokenizer's JSON without truncation and padding, which change from call to call."""
    state: dict[str, Any] = json.loads(backend.to_str())
    return {**state, "truncation": None, "padding": None}
