"""Who may import whom: between the rooms, and inside each of them in one direction."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from itertools import combinations
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

MAY_IMPORT = {
    "rankmill.jobs": {"rankmill.jobs"},
    "rankmill.workers": {"rankmill.jobs", "rankmill.workers"},
    "rankmill.producer": {"rankmill.jobs", "rankmill.producer"},
    "rankmill.extensions.lab.offline": {
        "rankmill.jobs", "rankmill.workers", "rankmill.extensions.lab.offline"
    },
    "rankmill.extensions": {"rankmill.jobs", "rankmill.producer", "rankmill", "rankmill.extensions"},
    "rankmill": {"rankmill.jobs", "rankmill.producer", "rankmill"},
    "benchmarks": {
        "rankmill.jobs", "rankmill.workers", "rankmill.producer", "rankmill", "rankmill.extensions",
        "benchmarks",
    },
}  # fmt: skip
"""What each room may import of ours, a room inside another first; tests may import everything.

The package's face is not a room.
"""

WORKERS = ("rankmill.workers", "rankmill.extensions.lab.offline")
"""What runs only where a worker's libraries are."""

NEEDS = {
    "grpc": {"gateway"},
    "batches": {"gateway", "runners"},
    "registry": {"gateway", "lab"},
}
"""Which extensions an extension needs."""

DIRECTION = {
    "rankmill.jobs": ["protocol", "model_names", "model_files", "cache", "runtime", "contract", "system"],
    "rankmill.workers": [
        "worker", "queue", "rq", "engine", "models", "backends", "batches", "host"
    ],
    "rankmill.producer": ["client", "local", "files", "collect"],
    "rankmill.extensions": [
        "grpc", "batches", "registry", "gateway", "runners", "rankings", "lab", "page"
    ],
    "rankmill": ["cli", "score", "cluster", "testing", "plugins"],
}  # fmt: skip
"""The parts of a room from the top to the bottom: each may import those after it, and no other."""

HEAVY = {"torch", "transformers", "tokenizers", "safetensors"}
FACE = {"rankmill", "rankmill.plugins"}
"""What all rooms may import: the public names, and what finds extensions."""


def room_of(module: str) -> str:
    return next(room for room in (*MAY_IMPORT, "tests") if module == room or module.startswith(f"{room}."))


def part_of(module: str) -> str:
    return module.removeprefix(f"{room_of(module)}.").split(".")[0]


def modules_of(room: str) -> Iterator[tuple[str, Path]]:
    for path in sorted((ROOT / room.replace(".", "/")).rglob("*.py")):
        if not any(parent.is_symlink() for parent in path.parents):  # configs and examples
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            if room_of(module) == room:
                yield module, path


MODULES = {module: path for room in MAY_IMPORT for module, path in modules_of(room)}


def imports(path: Path) -> set[str]:
    """Our modules that a module imports, wherever in it, also for types alone."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found.update(names & MODULES.keys() or {node.module})
    return found & MODULES.keys()


IMPORTS = {module: imports(path) - {module} for module, path in MODULES.items()}


def test_extensions_import_only_those_they_need() -> None:
    room = "rankmill.extensions"
    ours = {module: imported for module, imported in IMPORTS.items() if room_of(module) == room != module}
    for module, imported in ours.items():
        others = {part_of(each) for each in imported if room_of(each) == room} - {part_of(module)}
        assert others <= NEEDS.get(part_of(module), set()), module


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_rooms_import_only_what_they_may(room: str) -> None:
    for module, imported in IMPORTS.items():
        if room_of(module) == room and module not in FACE:
            others = {room_of(each) for each in imported - FACE}
            assert others <= MAY_IMPORT[room], module


@pytest.mark.parametrize("room", sorted(set(MAY_IMPORT) - {*WORKERS, "benchmarks"}))
def test_only_workers_import_what_runs_models(room: str) -> None:
    for _, path in modules_of(room):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            assert not {name.split(".")[0] for name in names} & HEAVY, path


@pytest.mark.parametrize("room", DIRECTION)
def test_inside_a_room_imports_go_one_way(room: str) -> None:
    order = DIRECTION[room]
    ours = [module for module in MODULES if room_of(module) == room and module != room]
    assert {part_of(module) for module in ours} == set(order)
    for module in ours:
        inside = {part_of(each) for each in IMPORTS[module] if room_of(each) == room and each not in FACE}
        assert inside <= set(order[order.index(part_of(module)) :]), module


def test_no_two_folders_beside_each_other_import_each_other() -> None:
    arrows: set[tuple[str, str]] = set()
    for module, imported in IMPORTS.items():
        for other in imported:
            if {module, other} & FACE:
                continue
            here, there = module.split("."), other.split(".")
            shared = next((n for n, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), None)
            if shared is not None:
                arrows.add((".".join(here[: shared + 1]), ".".join(there[: shared + 1])))
    pairs = combinations(sorted({each for arrow in arrows for each in arrow}), 2)
    assert [pair for pair in pairs if {pair, pair[::-1]} <= arrows] == []


def test_imports_have_no_cycles() -> None:
    assert list(TopologicalSorter(IMPORTS).static_order())  # raises CycleError, which names the modules


def test_no_two_public_classes_share_a_name() -> None:
    product = [path for module, path in MODULES.items() if room_of(module) != "benchmarks"]
    bodies = [ast.parse(path.read_text()).body for path in product if not path.stem.endswith("_pb2")]
    names = [each.name for body in bodies for each in body if isinstance(each, ast.ClassDef)]
    assert [name for name, times in Counter(names).items() if times > 1 and not name.startswith("_")] == []


def test_workers_read_nothing_but_their_settings() -> None:
    for path in (ROOT / "rankmill" / "workers").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "rankmill.jobs.runtime.settings":
                assert "Settings" not in {alias.name for alias in node.names}, path
