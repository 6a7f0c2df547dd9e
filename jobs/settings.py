"""Settings: flag, then environment, then config file, then ``configs/base.yaml``.

The defaults live in ``configs/base.yaml`` and nowhere else. Workers, which RQ's command line
starts, read the same settings from the environment (``RANKMILL_DEVICE=cpu`` and so on).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from jobs.errors import ConfigError
from jobs.spec import Activation, Precision, ScoreSpec
from jobs.wire import MAX_CHUNK_ROWS

Device = Literal["auto", "cpu", "cuda", "mps"]
Backend = Literal["auto", "torch", "openvino", "onnx", "mlx"]
Count = Literal["auto"] | Annotated[int, Field(ge=1)]

BASE = Path(__file__).resolve().parent.parent / "configs" / "base.yaml"


def _names(value: Any) -> Any:
    """Names with commas between them, as an environment variable has them."""
    return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value


class Settings(BaseModel):
    """All settings, validated; see ``configs/base.yaml`` for what each one means."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(min_length=1)
    revision: str | None
    precision: Precision
    max_length: int | None = Field(ge=4)
    activation: Activation
    redis_url: str | None
    queue: str = Field(min_length=1)
    chunk_size: int = Field(ge=1, le=MAX_CHUNK_ROWS)
    window: int = Field(ge=1)
    run_ttl: int = Field(ge=60)
    max_retries: int = Field(ge=0)
    workers: Count
    device: Device
    backend: Backend
    threads: Count
    token_budget: Count
    claim_ahead: Count
    batch_wait_ms: float = Field(ge=0, le=1000)
    model_cache_size: int = Field(ge=1)
    model_cache_gib: float | None = Field(gt=0)
    model_idle_seconds: float | None = Field(gt=0)
    warm: Annotated[tuple[str, ...], BeforeValidator(_names)]
    cache_dir: str = Field(min_length=1)

    def spec(self, model: str | None = None) -> ScoreSpec:
        """The part of the settings that a run carries to its workers, or what it is for another model."""
        spec = ScoreSpec(**{name: getattr(self, name) for name in ScoreSpec.model_fields})
        same = model in (None, self.model)
        return spec if same else spec.model_copy(update={"model": model, "revision": None})

    @property
    def model_cache_bytes(self) -> int | None:
        """Of weights that a worker keeps."""
        return None if self.model_cache_gib is None else int(self.model_cache_gib * 2**30)


def load_settings(
    flags: Mapping[str, Any] | None = None,
    config: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Settings:
    """Merge all sources into one validated `Settings`.

    Parameters
    ----------
    flags
        Values given by the caller; ``None`` means not given.
    config
        A YAML file; defaults to ``RANKMILL_CONFIG`` if that is set.
    environ
        The environment variables to read.

    Raises
    ------
    ConfigError
        Names the key and where it was set: an unknown key, a bad value, an unreadable file.
    """
    layers: list[tuple[str, Mapping[str, Any]]] = [("configs/base.yaml", read_config(BASE))]
    config = config or environ.get("RANKMILL_CONFIG")
    if config:
        layers.append((str(config), read_config(Path(config))))
    layers.append(("the environment", _from_environ(environ)))
    layers.append(("the options given", {k: v for k, v in (flags or {}).items() if v is not None}))
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for name, layer in layers:
        merged.update(layer)
        origin.update(dict.fromkeys(layer, name))
    try:
        return Settings(**merged)
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        raise ConfigError(
            f"{key}: {first['msg']}, got {merged.get(key)!r} (set in {origin.get(key, 'nowhere')})"
        ) from None


def read_config(path: Path, _seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a YAML config file and the files it ``extends``, nearest last.

    Raises
    ------
    ConfigError
        Not readable, not YAML, an unknown key, or files that extend each other in a circle.
    """
    if path.resolve() in _seen:
        raise ConfigError(f"{path}: config files extend each other in a circle")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the config file: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a YAML file: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path}: a config file holds keys and values, this one holds {type(values).__name__}"
        )
    parent = values.pop("extends", None)
    for key in values:
        if key not in Settings.model_fields:
            raise ConfigError(f"{path}: unknown key {key!r}; keys are {', '.join(Settings.model_fields)}")
    if parent is None:
        return values
    return {**read_config(path.parent / str(parent), (*_seen, path.resolve())), **values}


def _from_environ(environ: Mapping[str, str]) -> dict[str, Any]:
    """Values of ``RANKMILL_<KEY>``; ``REDIS_URL`` counts for ``redis_url``."""
    found: dict[str, Any] = {}
    if environ.get("REDIS_URL"):
        found["redis_url"] = environ["REDIS_URL"]
    for key in Settings.model_fields:
        value = environ.get(f"RANKMILL_{key.upper()}")
        if value:
            found[key] = value
    return found
