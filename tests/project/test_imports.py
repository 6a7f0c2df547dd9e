"""Inside the rooms: who may import whom, no cycles, and folders that stay small."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for room in ("jobs", "workers", "producer", "rankmill")
    for path in sorted((ROOT / room).rglob("*.py"))
}

INSIDE: dict[str, set[str]] = {
    "jobs.cache": set(),
    "jobs.registry": {"jobs.cache", "jobs.errors", "jobs.runtime", "jobs.schema", "jobs.spec"},
    "jobs.runtime": {"jobs.errors", "jobs.keys", "jobs.prompts", "jobs.schema", "jobs.spec"},
    "producer.files": {"producer.journal", "producer.pairs", "producer.splitting"},
    "producer.local": set(),
    "rankmill.cluster": set(),
    "rankmill.progress": set(),
    "rankmill.session": set(),
    "rankmill.tuning": {"rankmill.session"},
    "rankmill.quantization": {"rankmill.registry", "rankmill.session", "rankmill.tuning"},
    "rankmill.registry": {"rankmill.cluster", "rankmill.session", "rankmill.tuning"},
    "rankmill.gateway": {"rankmill.cluster", "rankmill.registry"},
    "rankmill.scoring": set(),
    "rankmill.evaluation": set(),
    "rankmill.mining": set(),
    "rankmill.score_file": {"rankmill.session", "rankmill.progress", "rankmill.scoring"},
    "workers.disk_cache": set(),
    "workers.gpu": set(),
    "workers.metrics": {"workers.gpu"},
    "workers.backends": {"workers.device", "workers.disk_cache", "workers.models"},
    "workers.quantization": {"workers.backends", "workers.disk_cache", "workers.models"},
    "workers.models": {"workers.backends", "workers.disk_cache", "workers.engine", "workers.versions"},
    "workers.versions": {"workers.disk_cache"},
    "workers.engine": {
        "workers.backends", "workers.device", "workers.disk_cache", "workers.metrics", "workers.models"
    },
}  # fmt: skip
"""What the parts of a room may import of it; a part that is not here may import all but the `TOPS`."""

TOPS = ("producer.files", "rankmill.cli", "workers.worker")


def imports(path: Path) -> set[str]:
    """Our modules that a module imports, wherever in it, but not only for types."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found.update(names & MODULES.keys() or {node.module})
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found & MODULES.keys()


def part(module: str) -> str:
    """The folder or module of a room that a module is in."""
    return ".".join(module.split(".")[:2])


def parts_of_own_room(module: str) -> set[str]:
    room = module.split(".", maxsplit=1)[0]
    return {part(each) for each in imports(MODULES[module]) if each.split(".")[0] == room}


@pytest.mark.parametrize("name", INSIDE)
def test_parts_of_rooms_import_only_what_they_may(name: str) -> None:
    ours = [module for module in MODULES if part(module) == name]
    assert ours
    for module in ours:
        assert parts_of_own_room(module) - {name} <= INSIDE[name], module


@pytest.mark.parametrize("name", TOPS)
def test_the_top_of_a_room_is_imported_by_nothing_below(name: str) -> None:
    room = name.split(".", maxsplit=1)[0]
    for module in MODULES.keys() - {room}:
        if module.split(".")[0] == room and part(module) != name:
            assert name not in parts_of_own_room(module), module


def test_imports_have_no_cycles() -> None:
    graph = {module: imports(path) - {module} for module, path in MODULES.items()}
    assert list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the modules


def test_workers_read_nothing_but_their_settings() -> None:
    for path in (ROOT / "workers").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "jobs.runtime.settings":
                assert "Settings" not in {alias.name for alias in node.names}, path
