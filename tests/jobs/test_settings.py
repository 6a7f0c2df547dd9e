"""Settings: where a value comes from, and what is said of a bad one."""

from __future__ import annotations

import json
import pickle
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import Field

from rankmill import plugins
from rankmill.cli.config import config, config_schema
from rankmill.jobs.contract.errors import ConfigError
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.runtime.hosts import CLAIM_AHEAD, TOKEN_BUDGETS
from rankmill.jobs.runtime.settings import (
    BASE,
    ExtensionSettings,
    Settings,
    extension_settings,
    load_settings,
)


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
        (
            "modle: x\n",
            r"my\.yaml: unknown key 'modle', the nearest is model; rankmill config show lists the keys",
        ),
        ("extends: my.yaml\n", "extend each other in a circle"),
        ("extends: other.yaml\n", r"other\.yaml: cannot be read"),
        ("- a\n- b\n", "holds keys and values, this one holds list"),
        ("a: [\n", "not a YAML file"),
        ("chunk_size: many\n", r"chunk_size: .* got 'many' \(set in .*my\.yaml\)"),
        ("precision: fp7\n", r"precision: .* got 'fp7'"),
        ("backend: tpu\n", r"backend: no installed package has this backend; use auto, mlx, .* got 'tpu'"),
        ("workers: 0\n", "workers: "),
        ("cache_gib: .inf\n", "cache_gib: Input should be a finite number, got inf"),
    ],
)
def test_a_bad_file_is_named_with_its_key(tmp_path: Path, text: str, message: str) -> None:
    config = tmp_path / "my.yaml"
    config.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_settings(config=config, environ={})


def test_a_link_to_itself_is_told(tmp_path: Path) -> None:
    config = tmp_path / "my.yaml"
    config.symlink_to(config)
    with pytest.raises(ConfigError, match=r"my\.yaml: cannot be read: Too many levels of symbolic links"):
        load_settings(config=config, environ={})


@pytest.mark.parametrize(
    ("setting", "value"),
    [("label", ""), ("instruction", "x" * 70_000), ("prompt_template", "{{x}}" * 20_000)],
)
def test_what_no_spec_may_have_is_one_line(setting: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"^{setting}: String should have at"):
        load_settings({setting: value}).spec()


@pytest.mark.parametrize("setting", ["run_ttl", "max_retries"])
def test_numbers_that_redis_or_a_run_cannot_hold_are_refused_with_the_setting(setting: str) -> None:
    with pytest.raises(ConfigError, match=f"^{setting}: .* less than or equal to 1000000000, got 10"):
        load_settings({setting: 10**19})


def test_a_bad_value_is_traced_to_the_environment_or_the_options() -> None:
    with pytest.raises(ConfigError, match="set in the environment"):
        load_settings(environ={"RANKMILL_WINDOW": "0"})
    with pytest.raises(ConfigError, match=r"lease_seconds: must be at least twice .* 8.0, got '9'"):
        load_settings(environ={"RANKMILL_HEARTBEAT_SECONDS": "8", "RANKMILL_LEASE_SECONDS": "9"})
    with pytest.raises(ConfigError, match=r"lease_seconds: .* which is 9.0, got 15 \(set in base"):
        load_settings(environ={"RANKMILL_HEARTBEAT_SECONDS": "9"})
    with pytest.raises(ConfigError, match=r"heartbeat_seconds: .* greater than or equal to 0.1"):
        load_settings(environ={"RANKMILL_HEARTBEAT_SECONDS": "0"})
    with pytest.raises(ConfigError, match="set in the options given"):
        load_settings({"max_length": 1}, environ={})


def test_a_variable_that_is_no_setting_is_told_with_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match="RANKMILL_PRECISON is not a setting, the nearest is RANKMILL_PRECISION"
    ):
        load_settings(environ={"RANKMILL_PRECISON": "fp32"})
    with pytest.raises(ConfigError, match=r"RANKMILL_XYZZY is not a setting; unset or correct it$"):
        load_settings(environ={"RANKMILL_XYZZY": ""})


def test_variables_of_kubernetes_for_a_service_are_not_settings() -> None:
    names = ["SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_80_TCP", "PORT_80_TCP_ADDR"]
    environ = {f"RANKMILL_{service}{name}": "x" for name in names for service in ("", "EXPORTER_")}
    assert load_settings(environ={"RANKMILL_REQUIRE_TOOLS": "1", **environ}) == load_settings(environ={})


HOSTILE = {
    "a date that is none": ("run_ttl: 2026-13-45\n", "not a YAML file: month must be in"),
    "an integer of 5,000 digits": (f"window: {'9' * 5000}\n", "line 1: a value of 5,000 characters"),
    "an integer too long to print": (f"window: 0x{'f' * 5000}\n", "line 1: a value of 5,002 characters"),
    "20,000 brackets": (f"model: {'[' * 20_000}\n", "line 1: lists and mappings nested deeper than 32"),
    "20,000 mappings": ("? " * 20_000, "nested deeper than 32"),
    "a billion laughs": (
        "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60)),
        r"line 2: an alias \(\*a0\)",
    ),
    "a value that is not of its type": ("window: !!int ''\n", "not a YAML file: "),
    "no constructor": ("window: !!python/object/apply:os.getcwd []\n", "not a YAML file: "),
    "a key that is a list": ("? [1]\n: 2\n", "not a YAML file: "),
    "a key that is a number": ("5: 2\n", "unknown key 5"),
    "not text": ("model: \udcff\n", "not a YAML file: "),
    "a file of another kind": ("x" * 300_000, "larger than 256 KiB"),
    "extends no name": ("extends: [a]\n", "extends names a file, not"),
    "extends no path": ('extends: "a\\0b"\n', "extends names a file, not"),
    "a value with a long list": (f"window: [{'1, ' * 1000}]\n", "window: "),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_one_short_line(tmp_path: Path, name: str) -> None:
    text, message = HOSTILE[name]
    path = tmp_path / "my.yaml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=message) as caught:
        load_settings(config=path, environ={})
    assert len(str(caught.value)) < 1000
    assert "\n" not in str(caught.value)


@given(st.binary(max_size=200) | st.text("[]{}:-&*!?#|>%@`'\"\\ \n\t0ax.=<", max_size=60).map(str.encode))
@example(b"window: !!timestamp x")
@example(b"window: !!bool x")
@example(b"=")
def test_whatever_a_config_file_holds_it_is_read_or_refused(raw: bytes) -> None:
    with tempfile.NamedTemporaryFile(suffix=".yaml") as file:
        Path(file.name).write_bytes(raw)
        with suppress(ConfigError):
            load_settings(config=file.name, environ={})


SHIPPED = sorted(BASE.parent.glob("*.yaml"))


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_shipped_files_are_valid_and_say_when_to_use_them(file: Path) -> None:
    assert load_settings(config=file.stem, environ={}) == load_settings(config=file, environ={})
    first, second, *_ = file.read_text().splitlines()
    assert first == "# yaml-language-server: $schema=schema.json"
    assert second.startswith("# ")


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_a_copy_of_a_shipped_file_works_in_any_folder(file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "my.yaml"
    copy.write_text(file.read_text())
    of_copy, of_shipped = (load_settings(config=each, environ={}) for each in (copy, file))
    assert of_copy.model_dump() == of_shipped.model_dump()


def test_a_name_that_is_not_shipped_is_told_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match="shipped with rankmill; shipped are base, cpu, cpu-openvino, cuda"):
        load_settings(config="gpu", environ={})


def test_show_prints_a_config_file_that_says_where_values_come_from(tmp_path: Path) -> None:
    child = tmp_path / "child.yaml"
    child.write_text(f"extends: {BASE.with_name('low-memory.yaml')}\nwindow: 9\n")
    environ = {"RANKMILL_QUEUE": "q", "REDIS_URL": "redis://me:hunter2@host/0"}
    shown = CliRunner().invoke(config, ["show", "--config", str(child)], env=environ)
    assert shown.exit_code == 0
    sources = dict(line.split("  # ") for line in shown.stdout.splitlines())
    sources = {key.strip(): Path(source).name for key, source in sources.items()}
    assert sources["window: 9"] == "child.yaml"
    assert sources["token_budget: 1024"] == "low-memory.yaml"
    assert sources["max_retries: 3"] == "base.yaml"
    assert sources["queue: q"] == sources["redis_url: redis://me:***@host/0"] == "the environment"
    settings = yaml.safe_load(
        shown.stdout.replace("webhook_***", "webhook_secret")
    )  # a password of another test
    assert settings["batch_wait_ms"] == 2
    assert list(settings) == list(yaml.safe_load(BASE.read_text()))
    assert settings.keys() == {*Settings.model_fields, *extension_settings()}


def test_show_refuses_what_a_command_would_refuse() -> None:
    shown = CliRunner().invoke(config, ["show"], env={"RANKMILL_WINDOW": "0"})
    assert shown.exit_code == 2
    assert "window: " in shown.output
    assert "set in the environment" in shown.output


def test_the_schema_is_that_of_the_settings() -> None:
    assert json.loads(BASE.with_name("schema.json").read_text()) == config_schema(), (
        "run: rankmill config schema > configs/schema.json"
    )


def test_base_yaml_has_the_defaults_of_a_score_spec() -> None:
    base = yaml.safe_load(BASE.read_text())
    optional = {name: field.default for name, field in ScoreSpec.model_fields.items() if name != "model"}
    assert {name: base[name] for name in optional} == optional


def test_base_yaml_names_the_numbers_that_auto_stands_for() -> None:
    lines = BASE.read_text().splitlines()
    for name, numbers in (("token_budget", TOKEN_BUDGETS), ("claim_ahead", CLAIM_AHEAD)):
        (line,) = [line for line in lines if line.startswith(f"{name}:")]
        named = "{cpu} on CPUs, {cuda} on CUDA, {mps} on MPS".format(**numbers)
        assert f"auto: {named}" in line


def test_settings_of_an_extension_that_is_not_installed_are_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(plugins, "names", lambda seam: [])
    file = tmp_path / "my.yaml"
    file.write_text("gateway_pairs: 0\nqueue: q\n")
    assert load_settings(config=file, environ={"RANKMILL_GATEWAY_OPEN": "x"}).queue == "q"
    shown = CliRunner().invoke(config, ["show", "--config", str(file)])
    assert "gateway_" not in shown.stdout
    file.write_text("gateway_pair: 0\n")
    with pytest.raises(ConfigError, match="unknown key 'gateway_pair'"):
        load_settings(config=file, environ={})
    with pytest.raises(ConfigError, match="gateway_pairs: there is no such option"):
        load_settings({"gateway_pairs": 5}, environ={})


class MineSettings(ExtensionSettings):
    """Settings of another package."""

    mine_size: int = Field(7, ge=1)


def test_another_package_has_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "names", lambda seam: ["mine"])
    monkeypatch.setattr(plugins, "load", lambda seam, name: MineSettings)
    assert load_settings(environ={}).of(MineSettings).mine_size == 7
    environ = {"RANKMILL_MINE_SIZE": "0"}
    with pytest.raises(ConfigError, match=r"^mine_size: .* 1, got '0' \(set in the environment\)$"):
        load_settings(environ=environ).of(MineSettings)
    shown = CliRunner().invoke(config, ["show"], env={"RANKMILL_MINE_SIZE": "8"})
    assert "mine_size: 8" in shown.stdout


class SameName(ExtensionSettings):
    """A setting of another package, with a name that rankmill has."""

    queue: str = "mine"


def test_a_setting_with_the_name_of_one_of_rankmill_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    told = r"queue: tests\.jobs\.test_settings has a setting of this name, and so has rankmill; rename it"
    with pytest.raises(ConfigError, match=told):
        load_settings(environ={}).of(SameName)
    monkeypatch.setattr(plugins, "load_all", lambda seam: [SameName])
    with pytest.raises(ConfigError, match=told):
        extension_settings()
    monkeypatch.setattr(plugins, "load_all", lambda seam: [MineSettings, type("Other", (MineSettings,), {})])
    with pytest.raises(ConfigError, match=r"mine_size: .* and so has another extension"):
        extension_settings()
    monkeypatch.setattr(plugins, "load_all", lambda seam: [SameName.__module__])
    with pytest.raises(
        ConfigError, match=r"'tests.jobs.test_settings', .* is not a subclass of ExtensionSettings"
    ):
        extension_settings()


def test_settings_of_extensions_survive_a_pickle_and_a_change() -> None:
    settings = load_settings({"registry": "/models"}, environ={}).changed({"precision": "fp32"})
    assert settings.precision == "fp32"
    assert pickle.loads(pickle.dumps(settings)).environ()["RANKMILL_REGISTRY"] == "/models"
