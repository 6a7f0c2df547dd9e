"""Archives that anybody may have sent: a folder with a model's files, or one line; never anything outside."""

from __future__ import annotations

import io
import tarfile
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmill.extensions.registry.archives import unpack
from rankmill.jobs.contract.errors import InputError
from tests.harness.models.registries import entry

FILES = {"config.json": b"{}", "1_Pooling/config.json": b"[]", "model.safetensors": bytes(range(256)) * 9}


def tar(*more: tarfile.TarInfo, below: str = "./", kind: int = tarfile.PAX_FORMAT) -> bytes:
    """An archive of the files, with other entries behind them."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=kind) as archive:
        for name, content in FILES.items():
            archive.addfile(entry(below + name, size=len(content)), io.BytesIO(content))
        for each in more:
            archive.addfile(each, io.BytesIO(bytes(each.size)))
    return out.getvalue()


def files_in(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


HIDDEN = ("._config.json", ".git/config", "__pycache__/a.pyc")


@pytest.mark.parametrize("below", ["", "./", "trained/", "./" + "x" * 60 + "/"])
@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_model_at_the_top_or_in_one_folder(tmp_path: Path, below: str, kind: int) -> None:
    hidden = [entry(below + name, size=5) for name in HIDDEN]
    raw = tar(*hidden, below=below, kind=kind)
    assert files_in(unpack(io.BytesIO(raw), tmp_path / "model")) == FILES


def test_long_names_are_names(tmp_path: Path) -> None:
    name = "x" * 140 + ".json"
    for kind in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        folder = unpack(io.BytesIO(tar(entry(name), kind=kind)), tmp_path / str(kind))
        assert (folder / name).exists()


def sparse() -> tarfile.TarInfo:
    found = entry("big.safetensors", size=512)
    found.pax_headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": "big.safetensors",
        "GNU.sparse.realsize": "1000000000000",
    }
    return found


BAD = {
    "absolute": entry("/etc/outside.json"),
    "above": entry("a/../../outside.json"),
    "backslash": entry("a\\outside.json"),
    "control": entry("a\nb.json"),
    "long": entry("a/" * 200 + "a.json"),
    "link": entry("a.json", kind=tarfile.SYMTYPE, link="/etc/passwd"),
    "hard link": entry("a.json", kind=tarfile.LNKTYPE, link="config.json"),
    "device": entry("a.json", kind=tarfile.CHRTYPE),
    "pipe": entry("a.json", kind=tarfile.FIFOTYPE),
    "old sparse": entry("a.json", kind=tarfile.GNUTYPE_SPARSE),
    "sparse": sparse(),
    "long name": entry("a/" * 20_000 + "a.json"),
    "twice": entry("config.json"),
    "below a file": entry("config.json/a.json"),
    "code": entry("modeling.py"),
    "pickle": entry("model.bin"),
}


@pytest.mark.parametrize("kind", sorted(BAD))
def test_what_no_model_has_is_one_line(tmp_path: Path, kind: str) -> None:
    with pytest.raises(InputError) as refused:
        unpack(io.BytesIO(tar(BAD[kind])), tmp_path / "model")
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert not Path("/etc/outside.json").exists()


def test_an_archive_that_ends_early_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    whole = tar()
    end = whole.rstrip(b"\0")
    for number, size in enumerate(range(0, len(end) + 512, 512)):
        with pytest.raises(InputError, match="not a tar archive, or only a part of one"):
            unpack(io.BytesIO(whole[: min(size, len(end) - 1)]), tmp_path / f"model-{number}")


def test_too_many_files_are_refused(tmp_path: Path) -> None:
    many = [entry(f"a{number}.json") for number in range(4100)]
    with pytest.raises(InputError, match="over 4,000 files"):
        unpack(io.BytesIO(tar(*many, kind=tarfile.USTAR_FORMAT)), tmp_path / "model")


@given(changes=st.lists(st.tuples(st.integers(0, 7000), st.integers(0, 255)), min_size=1, max_size=8))
def test_any_bytes_are_unpacked_inside_or_refused(changes: list[tuple[int, int]]) -> None:
    raw = bytearray(tar(entry("a.jsonl", size=700), kind=tarfile.GNU_FORMAT))
    for place, value in changes:
        raw[place % len(raw)] = value
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        try:
            inside = unpack(io.BytesIO(bytes(raw)), folder)
            assert inside.is_relative_to(folder)
        except InputError:
            pass
        assert [path.name for path in Path(name).iterdir()] == ["model"]
