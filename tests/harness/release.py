"""The files to publish: wheel and sdist, with their checksums and the packages they were tested with.

    python -m tests.harness.release dist    # of the last commit

Both are built twice, in different folders, and must have the same bytes. The wheel is then installed into an
empty environment by constraints.txt, and the sdist into another. Each scores pairs with the shipped model,
without a network where the system lets a process have none. Publishing is not done here.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_BUILD = """
import sys
from setuptools import build_meta
out = sys.argv[1]  # setuptools changes sys.argv
build_meta.build_sdist(out)
build_meta.build_wheel(out)
"""

_SBOM = "rankmill.cdx.json"


def build(commit: str, out: Path) -> list[Path]:
    """Build the sdist and the wheel of a commit; returns them.

    Raises
    ------
    subprocess.CalledProcessError
        There is no such commit, or it cannot be built.
    """
    out.mkdir(parents=True, exist_ok=True)
    when = _run("git", "log", "-1", "--format=%ct", commit, cwd=ROOT).strip()
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True)
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(folder, filter="data")
        quiet = ("-W", "ignore")  # setuptools takes the folders of data for packages that were forgotten
        _run(sys.executable, *quiet, "-c", _BUILD, out, cwd=Path(folder), environ={"SOURCE_DATE_EPOCH": when})
    (sdist,) = out.glob("*.tar.gz")
    _repack(sdist, int(when))
    return sorted([sdist, *out.glob("*.whl")])


def _repack(sdist: Path, when: int) -> None:
    """Write an sdist anew without what setuptools takes from the clock, the user and the folder's order."""
    with tarfile.open(sdist) as old:
        members = [(member, old.extractfile(member)) for member in old.getmembers()]
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new:
            for member, file in sorted(members, key=lambda each: each[0].name):
                member.mtime, member.uid, member.gid, member.uname, member.gname = when, 0, 0, "", ""
                member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
                member.pax_headers = {}
                new.addfile(member, file)
    with sdist.open("wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=when) as compressed:
        compressed.write(packed.getvalue())


def check_same(first: list[Path], second: list[Path]) -> None:
    """Raise `SystemExit` if files of the same names differ, or names do."""
    for one, other in zip(first, second, strict=True):
        if one.name != other.name or one.read_bytes() != other.read_bytes():
            raise SystemExit(f"{one.name} and {other.name} were built from one commit, and differ")


def checksums(files: list[Path]) -> str:
    """As ``sha256sum --check`` reads them."""
    return "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)


def try_out(package: Path, folder: Path, *, install: tuple[str, ...]) -> Path:
    """Install a package into an empty environment, and score the shipped example there; returns its Python.

    Raises
    ------
    subprocess.CalledProcessError
        It cannot be installed, or not all pairs get scores.
    """
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    _run(python, "-m", "pip", "install", "--quiet", *install, f"{package}[worker]", cwd=folder)
    command = [
        *_without_network(), folder / "bin" / "score-file", ROOT / "examples" / "pairs.jsonl",
        "--model", "demo", "-o", folder / "scored.parquet", "--json",
    ]  # fmt: skip
    summary = json.loads(_run(*command, cwd=folder))
    if summary["rows"] != 250 or summary["row_errors"]:
        raise SystemExit(f"{package.name}: not all pairs of the example have scores: {summary}")
    return python


def _without_network() -> tuple[str, ...]:
    """A command's prefix that leaves it no network but loopback, if the system allows that."""
    prefix = ("unshare", "--net", "--map-root-user")
    able = (
        shutil.which("unshare")
        and not subprocess.run([*prefix, "true"], check=False, capture_output=True).returncode
    )
    return prefix if able else ()


def _write_sbom(python: Path, out: Path, folder: Path, built: Path) -> None:
    """The packages of an environment, in CycloneDX; what lies in the folder `built` has its name alone."""
    venv.create(folder, with_pip=True)
    constraints = ("--constraint", str(ROOT / "constraints.txt"))
    _run(
        folder / "bin" / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        *constraints,
        "cyclonedx-bom",
        cwd=folder,
    )
    tool = folder / "bin" / "cyclonedx-py"
    _run(tool, "environment", "--output-reproducible", "--output-file", out, python, cwd=folder)
    out.write_text(out.read_text().replace(f"{built.as_uri()}/", ""))


def _run(*command: object, cwd: Path, environ: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**os.environ, **(environ or {})},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


def main(out: Path) -> None:
    """Build, compare, try out, and write checksums and the SBOM."""
    if _run("git", "status", "--porcelain", cwd=ROOT).strip():
        raise SystemExit("there are changes that no commit has: a release is made of a commit")
    constraints = ("--constraint", str(ROOT / "constraints.txt"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        built = build("HEAD", folder / "first")
        check_same(built, build("HEAD", folder / "second"))
        wheel, sdist = sorted(built, key=lambda path: path.suffix != ".whl")
        python = try_out(wheel, folder / "wheel", install=constraints)
        _write_sbom(python, folder / _SBOM, folder / "sbom", wheel.parent)
        shutil.rmtree(folder / "wheel")
        try_out(sdist, folder / "sdist", install=constraints)
        out.mkdir(parents=True, exist_ok=True)
        files = [Path(shutil.copy2(path, out)) for path in (*built, folder / _SBOM)]
    (out / "SHA256SUMS").write_text(checksums(files))
    for path in [*files, out / "SHA256SUMS"]:
        print(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
