"""The JSON documents of a registry: the manifests of versions, and the aliases."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from rankmill.jobs.contract.errors import InputError, RegistryError
from rankmill.jobs.contract.schema import Count, Seconds
from rankmill.jobs.model_files import digest_of
from rankmill.jobs.model_names import has_tag

ALIASES = "aliases"
"""Name of the folder with a model's aliases; no model, version or alias can have this name."""

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9_-])?")


class Reference(NamedTuple):
    """The name of a model, and the name of one of its versions or aliases."""

    name: str
    tag: str

    def __str__(self) -> str:
        return f"{self.name}@{self.tag}"


def is_name(text: str) -> bool:
    """Whether `text` can be a name in a registry."""
    return bool(_NAME.fullmatch(text)) and ".." not in text and text != ALIASES


def check_name(text: str, kind: str) -> str:
    """Return `text` if it can be a name in a registry. Error messages say that `kind`, such as ``a model``,
    cannot have this name.

    Raises
    ------
    InputError
        The text cannot be a name. Names are parts of paths and URLs.
    """
    if is_name(text):
        return text
    raise InputError(
        f"{text[:80]!r} cannot be the name of {kind}: a name has letters, digits, '.', '_' and '-', begins "
        f"with a letter or digit, and is at most 64 characters long"
    )


def parse_reference(text: str) -> Reference:
    """Split ``NAME@TAG`` into the model's name and the tag, which is a version or an alias.

    >>> parse_reference("reranker@production")
    Reference(name='reranker', tag='production')

    Raises
    ------
    InputError
        The text is not of the form ``NAME@TAG``, or its parts cannot be names in a registry.
    """
    if not has_tag(text):
        raise InputError(f"{text} is not of the form NAME@VERSION or NAME@ALIAS")
    name, _, tag = text.partition("@")
    return Reference(check_name(name, "a model in a registry"), check_name(tag, "a version or alias"))


MAX_FILES = 1000
MAX_NOTES = 2000
_MAX_BEFORE = 20
"""An alias keeps at most this many of its earlier targets; older ones are forgotten."""

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def read(cls, raw: bytes, subject: str) -> Self:
        """Read a document from JSON. Raises `RegistryError` if it is damaged or has another format; `subject`
        names the document in the message.
        """
        try:
            return cls.model_validate_json(raw)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            if first["loc"] == ("format",):
                raise RegistryError(
                    f"{subject} has format {first['input']!s:.20}, this release reads 1: use the release of "
                    "rankmill that wrote it"
                ) from None
            where = ".".join(map(str, first["loc"]))
            raise RegistryError(
                f"{subject} is damaged: {where + ': ' if where else ''}{first['msg']}"
            ) from None

    def written(self) -> bytes:
        return self.model_dump_json(indent=1).encode() + b"\n"


def check_path(path: str) -> str:
    """Return `path`; raises `ValueError` if it is not a path inside a model's folder."""
    parts = path.split("/")
    plain = path.isprintable() and "\\" not in path and len(path) <= 300
    if not plain or any(part in {"", ".", ".."} for part in parts) or PurePosixPath(path).is_absolute():
        raise ValueError(f"{path[:80]!r} is not a path inside a model's folder")
    return path


class ModelFile(_Document):
    """A file of a version: its path in the model's folder, its size and its SHA-256."""

    path: str
    bytes: Count
    sha256: Digest

    @field_validator("path")
    @classmethod
    def _stays_inside(cls, path: str) -> str:
        return check_path(path)


class Manifest(_Document):
    """The manifest of a version of a model; it is written last, so a version with a manifest is complete.

    Attributes
    ----------
    name, version
        The names of the model and of the version.
    content
        The digest of the paths, sizes and contents of all files.
    files
        The files, by path.
    family
        Transformers' model type.
    by, at
        The person or API key that pushed the version, and the time (seconds since 1970).
    notes
        Notes on the version.
    """

    model_config = ConfigDict(extra="ignore")  # manifests of earlier versions have a key `precision`

    format: Literal[1] = 1
    name: str
    version: str
    content: Digest
    files: tuple[ModelFile, ...] = Field(min_length=1, max_length=MAX_FILES)
    family: str
    by: str
    at: Seconds
    notes: str = Field(default="", max_length=MAX_NOTES)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def __str__(self) -> str:
        return f"{self.name}@{self.version}"

    @model_validator(mode="after")
    def _is_of_its_files(self) -> Self:
        if self.content != content_of(self.files):
            raise ValueError("its digest is not that of its list of files")
        if len({file.path for file in self.files}) < len(self.files):
            raise ValueError("it lists a file twice")
        return self


def content_of(files: Iterable[ModelFile]) -> str:
    """The digest of a version: of the paths, sizes and contents of all its files."""
    return digest_of((file.path, file.bytes, file.sha256) for file in files)


def with_share(name: str, share: float) -> str:
    """Return `name` with its share of the queries, such as ``v4 10%``, or only `name` if it gets them all."""
    return name if share == 1 else f"{name} {100 * share:.6g}%"


class Target(_Document):
    """What an alias stands for: one or several versions of its model.

    Attributes
    ----------
    versions
        Each version's share of the queries, such as ``{"v3": 0.9, "v4": 0.1}``.
    shadow
        A version that also scores all queries, but whose scores are not returned.
    by, at
        The person or API key that set the alias, and the time (seconds since 1970).
    """

    versions: dict[str, Annotated[float, Field(gt=0, le=1)]] = Field(min_length=1, max_length=20)
    shadow: str | None = None
    by: str
    at: Seconds

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        try:
            for version in self.named:
                check_name(version, "a version")
        except InputError as error:
            raise ValueError(str(error)) from None
        if abs(sum(self.versions.values()) - 1) > 1e-6:
            raise ValueError("the shares of its versions do not add up to 1")
        if self.shadow in self.versions:
            raise ValueError(f"{self.shadow} cannot be both a version that answers and the shadow")
        return self

    @property
    def named(self) -> tuple[str, ...]:
        return (*self.versions, *([self.shadow] if self.shadow else []))

    def __str__(self) -> str:
        shares = (with_share(version, share) for version, share in self.versions.items())
        return ", ".join(shares) + (f"; {self.shadow} in its shadow" if self.shadow else "")


class Alias(_Document):
    """The present target of an alias, and its earlier targets, the latest first."""

    format: Literal[1] = 1
    now: Target
    before: tuple[Target, ...] = Field(default=(), max_length=_MAX_BEFORE)

    def then(self, target: Target) -> Alias:
        """Return this alias with a new target. The present target becomes an earlier one, unless both have
        the same versions: then there would be nothing to roll back.
        """
        is_same = (target.versions, target.shadow) == (self.now.versions, self.now.shadow)
        before = self.before if is_same else (self.now, *self.before)[:_MAX_BEFORE]
        return Alias(now=target, before=before)


def target_of(versions: Mapping[str, float], *, shadow: str | None, by: str, at: float) -> Target:
    """Make a target for an alias from the versions' shares of the queries, such as ``{"v3": 0.9, "v4":
    0.1}``.

    The version `shadow` also scores all queries, but its scores are not returned. Raises `InputError` if a
    name or the shares are not valid, or if `shadow` also has a share.
    """
    try:
        return Target(versions=dict(versions), shadow=shadow, by=by, at=at)
    except ValidationError as error:
        reason = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise InputError(f"an alias cannot stand for {', '.join(versions)}: {reason}") from None
