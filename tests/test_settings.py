"""Settings: where a value comes from, and what is said of a bad one."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.errors import ConfigError
from jobs.settings import load_settings


def test_precedence_is_flag_environment_file_default(tmp_path: Path) -> None:
    config = tmp_path / "my.yaml"
    config.write_text("model: from-file\nqueue: from-file\nchunk_size: 7\n")
    environ = {"RANKMILL_QUEUE": "from-environment", "RANKMILL_CHUNK_SIZE": "8"}
    settings = load_settings({"chunk_size": 9, "window": None}, config, environ)
    assert (settings.model, settings.queue, settings.chunk_size) == ("from-file", "from-environment", 9)
    assert settings.window == load_settings(environ={}).window


def test_the_default_model_is_minilm() -> None:
    assert load_settings(environ={}).model == "cross-encoder/ms-marco-MiniLM-L-6-v2"


def test_redis_url_and_the_config_file_come_from_the_environment_too(tmp_path: Path) -> None:
    config = tmp_path / "my.yaml"
    config.write_text("queue: q\n")
    environ = {"REDIS_URL": "redis://a", "RANKMILL_CONFIG": str(config)}
    settings = load_settings(environ=environ)
    assert (settings.redis_url, settings.queue) == ("redis://a", "q")
    assert load_settings(environ={**environ, "RANKMILL_REDIS_URL": "redis://b"}).redis_url == "redis://b"


def test_a_file_extends_another(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("queue: base\nwindow: 5\n")
    child = tmp_path / "child.yaml"
    child.write_text("extends: base.yaml\nqueue: child\n")
    settings = load_settings(config=child, environ={})
    assert (settings.queue, settings.window) == ("child", 5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modle: x\n", r"my\.yaml: unknown key 'modle'; keys are model, revision"),
        ("extends: my.yaml\n", "extend each other in a circle"),
        ("extends: other.yaml\n", r"other\.yaml: cannot read the config file"),
        ("- a\n- b\n", "holds keys and values, this one holds list"),
        ("a: [\n", "not a YAML file"),
        ("chunk_size: many\n", r"chunk_size: .* got 'many' \(set in .*my\.yaml\)"),
        ("precision: fp8\n", r"precision: .* got 'fp8'"),
        ("workers: 0\n", "workers: "),
    ],
)
def test_a_bad_file_is_named_with_its_key(tmp_path: Path, text: str, message: str) -> None:
    config = tmp_path / "my.yaml"
    config.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_settings(config=config, environ={})


def test_a_bad_value_is_traced_to_the_environment_or_the_options() -> None:
    with pytest.raises(ConfigError, match="set in the environment"):
        load_settings(environ={"RANKMILL_WINDOW": "0"})
    with pytest.raises(ConfigError, match="set in the options given"):
        load_settings({"max_length": 1}, environ={})
