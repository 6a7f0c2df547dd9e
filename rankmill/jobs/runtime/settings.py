"""Settings, from options, the environment, a config file and ``configs/base.yaml``, in order of precedence.

The defaults come from ``configs/base.yaml``. Workers that RQ's command line starts read the same settings
from the environment (``RANKMILL_DEVICE=cpu`` and so on).
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypedDict, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
)
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import ValidationInfo

from rankmill import plugins
from rankmill.jobs.contract.errors import ConfigError
from rankmill.jobs.contract.home import expanded, model_of_run, shipped
from rankmill.jobs.contract.prompts import read_template
from rankmill.jobs.contract.schema import MAX_CHUNK_ROWS, Scored, Weight
from rankmill.jobs.contract.spec import (
    Activation,
    Long,
    Precision,
    ScoreSpec,
    Side,
    complaint,
    nearest,
)
from rankmill.jobs.runtime.passwords import mask_passwords, sendable_key, without_line_end
from rankmill.jobs.runtime.yaml_files import read_yaml, shown

Device = Literal["auto", "cpu", "cuda", "mps"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "human", "json"]
CountOrAuto = Literal["auto"] | Annotated[int, Field(ge=1)]

_PREFIX = "RANKMILL_"

_OPTIONS = "the options given"

_NOT_SETTINGS = re.compile(
    r"RANKMILL_(CONFIG|REQUIRE_TOOLS|SIMULATED_SECONDS|SUPERVISED)"
    r"|RANKMILL_(.+_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT|PORT_\d+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?)"
)
"""Matches variables that begin with ``RANKMILL_`` but are no settings. Rankmill has some of these; Kubernetes
sets others for a service named rankmill-….
"""

BASE = shipped("configs", "base.yaml")


def _installed_backend(name: str) -> str:
    if name != "auto" and name not in (installed := plugins.names("rankmill.backends")):
        message = "no installed package has this backend; use {known}"
        raise PydanticCustomError("no_backend", message, {"known": ", ".join(["auto", *installed])})
    return name


BackendName = Annotated[str, AfterValidator(_installed_backend)]

HeaderKey = Annotated[
    str | None, Field(min_length=16), AfterValidator(sendable_key), BeforeValidator(without_line_end)
]
"""A setting that is a secret key: at least 16 characters, all of which an HTTP header can contain."""


def _names(value: Any) -> Any:
    return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_names)]


def _text(value: Any) -> Any:
    """Turn a number into text, because a label may be a number."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


@dataclass(frozen=True)
class Sourced:
    """The value of a setting before validation, and the place where it was set."""

    value: Any
    source: str


class ExtensionSettings(BaseModel):
    """Base of an extension's settings.

    A package names its subclass in an entry point of the group ``rankmill.settings``, and reads its settings
    with `WorkerSettings.of`. If the class gives a field no default, ``configs/base.yaml`` does. If a command
    has an option for a field, the field's description is the option's help.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    of_workers: ClassVar[bool] = False
    """Whether workers read these settings. If so, a command that starts workers, such as score-file, passes
    the settings on to them.
    """


E = TypeVar("E", bound=ExtensionSettings)


class WorkerSettings(ScoreSpec):
    """Settings of a worker. Some models, such as those of ``warm``, are loaded before any chunk needs them.
    The fields of `ScoreSpec` say how.
    """

    # pydantic builds the validator at its first use
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    _of_extensions: Mapping[str, Sourced] = PrivateAttr(default_factory=dict)

    instruction: str | None = None
    prompt_template: str | None = None
    label: Annotated[str | None, BeforeValidator(_text)] = None
    inputs: Scored = "pairs"
    redis_wait_seconds: float = Field(gt=0)
    device: Device
    backend: BackendName
    threads: CountOrAuto
    token_budget: CountOrAuto
    max_batch: CountOrAuto
    length_aware: bool
    claim_ahead: CountOrAuto
    batch_wait_ms: float = Field(ge=0, le=1000)
    heartbeat_seconds: float = Field(ge=0.1, le=60)
    lease_seconds: int = Field(ge=2, le=3600)
    model_cache_size: int = Field(ge=1)
    model_cache_gib: float | None = Field(gt=0, allow_inf_nan=False)
    model_idle_seconds: float | None = Field(gt=0)
    warm: Names
    cache_dir: str = Field(min_length=1)
    cache_gib: float | None = Field(gt=0, allow_inf_nan=False)
    log_level: LogLevel
    log_format: LogFormat
    metrics_address: str = Field(min_length=1)

    @field_validator("lease_seconds")
    @classmethod
    def _outlasts_a_lost_heartbeat(cls, lease: int, info: ValidationInfo) -> int:
        heartbeat = info.data.get("heartbeat_seconds")  # None if heartbeat_seconds is not valid
        if heartbeat is not None and lease < 2 * heartbeat:
            message = "must be at least twice heartbeat_seconds, which is {heartbeat}"
            raise PydanticCustomError("lease_too_short", message, {"heartbeat": heartbeat})
        return lease

    def of(self, kind: type[E]) -> E:
        """Return the validated settings that an extension has defined by the class `kind`.

        Raises
        ------
        ConfigError
            A setting is not valid, and the message says where it was set; or two settings have the same name.
        """
        _check_names(kind)
        defaults = {key: Sourced(value, BASE.name) for key, value in _base().items()}
        merged = {**defaults, **self._of_extensions}
        return _validated(kind, {key: merged[key] for key in kind.model_fields if key in merged})

    def changed(self, changes: Mapping[str, Any]) -> Self:
        """Return a copy of these settings with other values, which are validated. Settings of extensions stay
        as they are.
        """
        settings = type(self).model_validate({**self.model_dump(), **changes})
        settings._of_extensions = self._of_extensions
        return settings

    def environ(self) -> dict[str, str]:
        """Return the environment variables that give these settings to a worker's process."""
        values = {key: getattr(self, key) for key in WorkerSettings.model_fields}
        if any(setting.source != BASE.name for setting in self._of_extensions.values()):
            for kind in dict.fromkeys(extension_settings().values()):
                values |= dict(self.of(kind)) if kind.of_workers else {}
        own = {f"{_PREFIX}{key.upper()}": _as_text(value) for key, value in values.items()}
        return {**own, "RANKMILL_CONFIG": ""}  # the worker needs no config file: this process has read it

    def spec(self, model: str | None = None) -> ScoreSpec:
        """Make the score spec of these settings. If `model` is not the model of the settings, the spec has no
        revision.

        Raises `ConfigError` if the prompt template does not exist, or a value is not valid for a spec.
        """
        spec = _made_spec({name: getattr(self, name) for name in ScoreSpec.model_fields})
        same = model in (None, self.model)
        return spec if same else spec.model_copy(update={"model": model, "revision": None})

    @property
    def model_cache_bytes(self) -> int | None:
        return None if self.model_cache_gib is None else int(self.model_cache_gib * 2**30)

    @property
    def cache_bytes(self) -> int | None:
        return None if self.cache_gib is None else int(self.cache_gib * 2**30)


class Settings(WorkerSettings):
    """The core's settings, validated; see ``configs/base.yaml`` for what each one means."""

    redis_url: str | None
    queue: str = Field(min_length=1)
    chunk_size: Literal["auto"] | Annotated[int, Field(ge=1, le=MAX_CHUNK_ROWS)]
    window: CountOrAuto
    window_mib: int = Field(ge=1)
    tenant: str = Field(max_length=200)
    weight: Weight
    run_ttl: int = Field(ge=60, le=1_000_000_000)
    max_retries: int = Field(ge=0, le=1_000_000_000)
    workers: CountOrAuto
    exporter_address: str = Field(min_length=1)
    exporter_hosts: Names


class SettingsOptions(TypedDict, total=False):
    """The settings of a client as options by name, except ``redis_url``; ``None`` means not given.

    An extension cannot add fields to this type, so the settings of rankmill's own extensions are fields here.
    """

    model: str | None
    revision: str | None
    precision: Precision | None
    max_length: int | None
    activation: Activation | None
    instruction: str | None
    prompt_template: str | None
    label: str | int | None
    long: Long | None
    long_stride: int | None
    truncation_side: Side | None
    max_passage_tokens: int | None
    all_labels: bool | None
    deterministic: bool | None
    inputs: Scored | None
    redis_wait_seconds: float | None
    device: Device | None
    backend: str | None
    threads: Literal["auto"] | int | None
    token_budget: Literal["auto"] | int | None
    max_batch: Literal["auto"] | int | None
    length_aware: bool | None
    claim_ahead: Literal["auto"] | int | None
    batch_wait_ms: float | None
    heartbeat_seconds: float | None
    lease_seconds: int | None
    model_cache_size: int | None
    model_cache_gib: float | None
    model_idle_seconds: float | None
    warm: str | Sequence[str] | None
    cache_dir: str | None
    cache_gib: float | None
    registry: str | None
    log_level: LogLevel | None
    log_format: LogFormat | None
    metrics_address: str | None
    queue: str | None
    chunk_size: Literal["auto"] | int | None
    window: Literal["auto"] | int | None
    window_mib: int | None
    tenant: str | None
    weight: float | None
    run_ttl: int | None
    max_retries: int | None
    workers: Literal["auto"] | int | None
    exporter_address: str | None
    exporter_hosts: str | Sequence[str] | None
    file_queue: str | None
    file_run_ttl: int | None


_CALL = frozenset({"chunk_size", "columns", "detached", "priority", "timeout", "top_k"})
"""Further options of a client's calls, which the error message for a misspelt option may suggest."""


def run_spec(settings: Settings, changes: Mapping[str, Any]) -> ScoreSpec:
    """Make the spec of a run from the settings and some changes. A model's directory gets an absolute path.
    The setting ``revision`` applies only to the model of the settings.

    Raises
    ------
    ConfigError
        A change has an unknown name or a value that is not valid.
    """
    names = {*ScoreSpec.model_fields, *_CALL} - changes.keys()
    spec = _made_spec({**settings.spec().model_dump(), **changes}, names)
    model = model_of_run(spec.model)
    is_other = "revision" not in changes and model != model_of_run(settings.model)
    return spec.model_copy(update={"model": model, **({"revision": None} if is_other else {})})


def _made_spec(values: Mapping[str, Any], names: Iterable[str] = ()) -> ScoreSpec:
    """Make a spec of `values`. They may name a prompt template, which is read first.

    Raises `ConfigError` if the template cannot be read or a value is not valid. For an unknown option, the
    message suggests one of `names`.
    """
    template = read_template(values["prompt_template"])
    try:
        return ScoreSpec(**{**values, "prompt_template": template})
    except ValidationError as error:
        raise ConfigError(complaint(error, names)) from None


def load_settings(
    flags: Mapping[str, Any] | None = None,
    config: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Settings:
    """Read the settings from the caller, the environment, a config file and the defaults, and validate them.

    Parameters
    ----------
    flags
        Values given by the caller; ``None`` means not given.
    config
        A YAML file or the name of one in ``configs/``; defaults to ``RANKMILL_CONFIG``.
    environ
        The environment variables to read.

    Raises
    ------
    ConfigError
        A key is unknown, a value is not valid, or a file cannot be read; the message names the key and its
        source.
    """
    return validate(merge_settings(flags, config, environ))


def merge_settings(
    flags: Mapping[str, Any] | None = None,
    config: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> dict[str, Sourced]:
    """Merge the sources of settings by precedence. Returns each setting's value, which is not validated yet,
    with its source.

    The parameters are those of `load_settings`.
    """
    layers = [(BASE.name, _base())]
    file = config_file(config, environ)
    if file:
        layers += config_layers(file)
    layers.append(("the environment", _from_environ(environ)))
    layers.append((_OPTIONS, {k: v for k, v in (flags or {}).items() if v is not None}))
    return {key: Sourced(value, source) for source, values in layers for key, value in values.items()}


def extension_settings() -> dict[str, type[ExtensionSettings]]:
    """Return the names of the settings of all installed extensions, each with the class that it belongs to.

    Raises `ConfigError` if an extension's class is not a subclass of `ExtensionSettings`, or if two settings
    have the same name.
    """
    kinds: dict[str, type[ExtensionSettings]] = {}
    for kind in plugins.load_all("rankmill.settings"):
        if not (isinstance(kind, type) and issubclass(kind, ExtensionSettings)):
            raise ConfigError(
                f"{kind!r:.80}, which a package adds to rankmill.settings, is not a subclass of "
                "ExtensionSettings; repair or uninstall that package"
            )
        _check_names(kind, kinds)
        kinds |= dict.fromkeys(kind.model_fields, kind)
    return kinds


def _check_names(kind: type[ExtensionSettings], others: Collection[str] = ()) -> None:
    for key in kind.model_fields:
        if key in Settings.model_fields or key in others:
            whose = "rankmill" if key in Settings.model_fields else "another extension"
            raise ConfigError(
                f"{key}: {kind.__module__} has a setting of this name, and so has {whose}; rename it there, "
                "or uninstall its package"
            )


def _is_setting(key: str) -> bool:
    """Return whether the core or an extension has a setting of this name.

    Extensions of rankmill count even if they are not installed.
    """
    return key in Settings.model_fields or key in _base() or key in extension_settings()


def _all_settings() -> set[str]:
    return {*Settings.model_fields, *extension_settings()}


def validate(merged: Mapping[str, Sourced]) -> Settings:
    """Validate the core's settings in `merged`. `WorkerSettings.of` validates the settings of extensions.

    Raises `ConfigError` for an unknown option, or for the first setting that is not valid.
    """
    others = {key: entry for key, entry in merged.items() if key not in Settings.model_fields}
    for key, entry in others.items():
        if entry.source == _OPTIONS and key not in extension_settings():
            near = nearest(key, _all_settings())
            raise ConfigError(f"{key}: there is no such option{near} (set in {entry.source})")
    settings = _validated(Settings, {key: merged[key] for key in merged.keys() - others.keys()})
    settings._of_extensions = others
    return settings


M = TypeVar("M", bound=BaseModel)


def _validated(kind: type[M], merged: Mapping[str, Sourced]) -> M:
    try:
        return kind(**{key: entry.value for key, entry in merged.items()})
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        entry = merged.get(key, Sourced(None, "nowhere"))
        raise ConfigError(
            f"{key}: {first['msg']}, got {shown(mask_passwords(repr(entry.value)))} (set in {entry.source})"
        ) from None


def _as_text(value: object) -> str:
    return ",".join(value) if isinstance(value, tuple) else "null" if value is None else str(value)


def config_layers(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Read a YAML config file and the files that it ``extends``. Returns (name, values) for each file, with
    `path` last.

    Raises
    ------
    ConfigError
        A file cannot be read or is not YAML, has an unknown key, or extends itself.
    """
    layers: list[tuple[str, dict[str, Any]]] = []
    seen: set[str] = set()
    file: Path | None = path
    while file is not None:
        place = os.path.realpath(file)
        if place in seen:
            raise ConfigError(f"{file}: config files extend each other in a circle")
        seen.add(place)
        values = _read(file)
        parent = values.pop("extends", None)
        if not isinstance(parent, str | None) or "\0" in (parent or ""):
            raise ConfigError(f"{file}: extends names a file, not {shown(repr(parent))}")
        for key in values:
            if not _is_setting(key):
                near = nearest(str(key), _all_settings())
                raise ConfigError(
                    f"{file}: unknown key {shown(repr(key))}{near}; rankmill config show lists the keys"
                )
        layers.append((str(file), values))
        file = None if parent is None else file.parent / parent
    return layers[::-1]


@cache
def _base() -> dict[str, Any]:
    """Read the defaults of all settings once in a process, because parsing takes long."""
    return _read(BASE)


def _read(path: Path) -> dict[str, Any]:
    values = read_yaml(path) or {}
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path}: a config file holds keys and values, this one holds {type(values).__name__}"
        )
    return values


def config_file(
    config: str | os.PathLike[str] | None = None, environ: Mapping[str, str] = os.environ
) -> Path | None:
    """Return the path of the config file, or ``None`` if neither `config` nor ``RANKMILL_CONFIG`` names one.

    `config` comes before ``RANKMILL_CONFIG``. Each of the two can be a path or the name of a shipped file. A
    path is returned even if no file exists there.

    Raises
    ------
    ConfigError
        The name is not a path, and neither the current folder nor rankmill has a config file of this name.
    """
    config = config or environ.get("RANKMILL_CONFIG")
    if not config:
        return None
    path = expanded(os.fspath(config))
    if path.exists() or path.suffix or len(path.parts) > 1:
        return path
    shipped = BASE.with_name(f"{path}.yaml")
    if not shipped.exists():
        names = ", ".join(sorted(file.stem for file in BASE.parent.glob("*.yaml")))
        raise ConfigError(f"no config file {path}, here or shipped with rankmill; shipped are {names}")
    return shipped


def _from_environ(environ: Mapping[str, str]) -> dict[str, Any]:
    """Read settings from the environment variables ``RANKMILL_<KEY>``, and ``redis_url`` from ``REDIS_URL``.

    Raises
    ------
    ConfigError
        A variable that starts with ``RANKMILL_`` is neither a setting nor one of `_NOT_SETTINGS`.
    """
    values: dict[str, Any] = {}
    if environ.get("REDIS_URL"):
        values["redis_url"] = environ["REDIS_URL"]
    for name, value in environ.items():
        if not name.startswith(_PREFIX):
            continue
        key = name.removeprefix(_PREFIX).lower()
        if name == f"{_PREFIX}{key.upper()}" and _is_setting(key):
            if value:  # an empty text means that it is not set
                values[key] = None if value == "null" else value
        elif not _NOT_SETTINGS.fullmatch(name):
            near = nearest(key, _all_settings(), lambda key: f"{_PREFIX}{key.upper()}")
            raise ConfigError(f"the environment variable {name} is not a setting{near}; unset or correct it")
    return values
