"""The format of an output, the names of its files, a check of the place for it, and facts from metadata."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from rankmill.jobs.contract.errors import InputError
from rankmill.producer.files.formats.base import Format, Writer
from rankmill.producer.files.formats.table import of_ending, split_ending, written_formats
from rankmill.producer.files.formats.trec import TREC
from rankmill.producer.files.stores.paths import AnyPath
from rankmill.producer.files.stores.places import check_replaceable, check_writable

QUERY_IDS = ("query_id", "qid", "query-id", "topic_id")
PASSAGE_IDS = ("passage_id", "pid", "doc_id", "docid", "docno", "corpus_id", "corpus-id")

PART, PARTS = "rankmill.part", "rankmill.parts"
"""Keys in the metadata of an output's part. The first is for the part's number, the second for the number of
parts.
"""

_NAME = re.compile(r"part-([0-9]{5,})-of-([0-9]{5,})\.[a-z0-9]+")
_LIST = re.compile(rf"_{_NAME.pattern}\.errors\.jsonl")


def part_number(name: str) -> int | None:
    """Return the number in a part's name: 3 for ``part-00003-of-00008.csv``, ``None`` for another name."""
    match = _NAME.fullmatch(name)
    return match and int(match[1])


def is_part(name: str) -> bool:
    """Whether a file's name shows a part of an output."""
    return _NAME.fullmatch(name) is not None


def errors_name(name: str) -> str:
    """Return the name of a file's list of row errors. The list of a part has a name that begins with ``_``,
    so that programs that read the folder of parts skip the list.
    """
    return f"{'_' if is_part(name) else ''}{name}.errors.jsonl"


def is_of_parts(name: str) -> bool:
    """Whether a file's name shows a part of an output, or a part's list of row errors."""
    return is_part(name) or _LIST.fullmatch(name) is not None


@dataclass(frozen=True)
class OutputFormat:
    """Describes the format of an output and the ranking of its rows.

    Parameters
    ----------
    kind
        The name of a format; with ``None``, the ending of the output's name gives it.
    top_k
        The passages of each query are ranked by score, and this many are kept. With ``None``, a TREC run has
        all passages, ranked, and other outputs have all rows in input order.
    rank_column
        Name of the column with the rank (from 1), if the output has one.
    query_id, passage_id
        Columns with the ids. With ``None``, an id's column is the only column that has one of the usual
        names.
    tag
        Name of the run, in the last column of TREC.
    """

    kind: str | None = None
    top_k: int | None = None
    rank_column: str = "rank"
    query_id: str | None = None
    passage_id: str | None = None
    tag: str = "rankmill"

    @property
    def ending(self) -> str:
        """The ending of names of parts, and of the name of an output that the user did not name."""
        return f".{self.kind or 'parquet'}"

    def part_name(self, number: int, count: int) -> str:
        return f"part-{number:05}-of-{count:05}{self.ending}"

    def of(self, path: AnyPath) -> Format:
        """Return the format in which the output at `path` is written.

        Raises
        ------
        InputError
            The name does not give a format, or its ending does not fit the format; or no installed package
            writes the format.
        """
        ending, compression = split_ending(path)
        named = of_ending(ending)
        named = named if named and named.writer else None
        form = named if self.kind is None else self._asked()
        if form is None:
            endings = ", ".join(ending for written in written_formats() for ending in written.endings)
            raise InputError(
                f"{path}: cannot tell the format from the name; end it in {endings} (text also "
                "in .gz or .zst), or name it with --output-format"
            )
        if named not in (None, form):
            raise InputError(f"{path}: --output-format {form.name} does not fit the name's ending {ending}")
        if compression and not form.is_text:
            raise InputError(
                f"{path}: {form.name.capitalize()} is compressed inside; leave {path.suffix} out of the name"
            )
        return form

    def _asked(self) -> Format:
        form = of_ending(f".{self.kind}")
        if form is None or form.name != self.kind or form.writer is None:
            names = ", ".join(written.name for written in written_formats())
            raise InputError(f"--output-format {self.kind}: nothing installed writes it; use one of {names}")
        return form

    def ranks(self, path: AnyPath) -> bool:
        return self.top_k is not None or self.of(path) is TREC

    def group(self, schema: pa.Schema, query: str) -> str:
        """Return the column that tells queries apart: the column of their ids, or `query` if the input has no
        ids.

        Parameters
        ----------
        schema
            The columns of the input.
        query
            The column with the queries' texts.

        Raises
        ------
        InputError
            The column that the user named is missing, or holds lists or objects; or several columns could
            hold the ids.
        """
        return _id_column(schema, self.query_id, QUERY_IDS, "--query-id-column") or query

    def ids(self, schema: pa.Schema) -> tuple[str, str]:
        """Return the names of the input's columns with the ids of query and passage.

        Raises
        ------
        InputError
            For queries or for passages, the input has no column of ids, or several; or the column holds lists
            or objects.
        """
        columns = []
        for option, named, usual in (
            ("--query-id-column", self.query_id, QUERY_IDS),
            ("--passage-id-column", self.passage_id, PASSAGE_IDS),
        ):
            name = _id_column(schema, named, usual, option)
            if name is None:
                raise InputError(
                    f"a TREC run needs ids, and the input has no column {' or '.join(usual)}; "
                    f"name the column with {option}"
                )
            columns.append(name)
        return columns[0], columns[1]

    def writer(self, path: AnyPath, target: AnyPath, schema: pa.Schema, score: str) -> Writer:
        """Open a file for writing, in the format of an output.

        Parameters
        ----------
        path
            The file, which the caller moves to `target` when it is complete.
        target
            The place of the output.
        schema
            The columns of the output.
        score
            The column of scores that a TREC run has.
        """
        form, compression = self.of(target), split_ending(target)[1]
        assert form.writer
        if form is not TREC:
            return form.writer(path, schema, compression)
        columns = (*self.ids(schema), self.rank_column, score)
        return form.writer(path, schema, compression, columns, self.tag)


def check_target(path: AnyPath, form: OutputFormat) -> None:
    """Check that a file can be written at `path`; raises `InputError` if not."""
    # The list of errors is checked first: its name is longer than the output's, and may be too long.
    check_replaceable(path.with_name(errors_name(path.name)))
    if path.is_dir():
        raise InputError(f"{path} is a directory; name a file with -o, or add --rows-per-part")
    check_replaceable(path)
    if form.of(path) is TREC and not re.fullmatch(r"\S+", form.tag):
        raise InputError(f"--tag {form.tag!r}: a TREC run needs a name without spaces")
    check_writable(path)


def known_column(names: Sequence[str], usual: Sequence[str], subject: str, way_out: str) -> str | None:
    """Find the column that has one of the usual names, or return ``None``.

    Parameters
    ----------
    names
        The names of all columns.
    usual
        The usual names.
    subject
        What the column holds; messages begin with it.
    way_out
        Advice to the user if several columns have a usual name.

    Raises
    ------
    InputError
        Several columns have a usual name, or two columns have the same one.
    """
    present = [name for name in usual if name in names]
    if twice := next((name for name in present if list(names).count(name) > 1), None):
        raise InputError(f"{subject} could be in two columns, which are both named {twice!r}: rename one")
    if len(present) > 1:
        raise InputError(f"{subject} could be in column {' or '.join(map(repr, present))}: {way_out}")
    return present[0] if present else None


def _id_column(schema: pa.Schema, named: str | None, usual: Sequence[str], option: str) -> str | None:
    if named is not None and named not in schema.names:
        raise InputError(f"{option}: no column {named!r} in the input")
    subject = "the query's id" if usual is QUERY_IDS else "the passage's id"
    column = named or known_column(schema.names, usual, subject, f"name it with {option}")
    if column and pa.types.is_nested(schema.field(column).type):
        raise InputError(
            f"column {column!r} holds {schema.field(column).type}, not ids; choose with {option}"
        )
    return column


def option_of(made: Mapping[str, str], name: str) -> str | None:
    """Return the value of an option with which an output was made, or ``None`` if it was not set.

    An empty value counts as not set, except for ``instruction``.

    Parameters
    ----------
    made
        The metadata of the output.
    name
        The name of the option.
    """
    written = made.get(f"rankmill.{name}")
    return written if written or name == "instruction" else None


def bound_of(made: Mapping[str, str]) -> float | None:
    """Return how far the logits of an output can be from the model's own, or ``None`` if the output's
    metadata (`made`) do not say.
    """
    written = made.get("rankmill.bound")
    return None if written is None else float(written)
