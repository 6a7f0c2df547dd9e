"""``rankmill merge``: one output from shards."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from rankmill.cli import options
from rankmill.jobs.contract.errors import ExitCode, InputError
from rankmill.producer.files.formats.table import TREC
from rankmill.producer.files.outputs import OutputFormat, check_target
from rankmill.producer.files.shards import merge
from rankmill.producer.files.stores.paths import ObjectPath


@options.command("merge")
@click.argument("shards", nargs=-1, required=True, type=options.PATH, metavar="SHARD...")
@click.option("-o", "--output", required=True, type=options.PATH, metavar="FILE",
              help="File to write: .parquet, .csv, .tsv or .jsonl.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace an existing output.")
def merge_shards(shards: tuple[Path, ...], output: Path, force: bool) -> None:
    """Merge the outputs of score-file --shard.

    SHARDS are the outputs of --shard 1/N to N/N; the rows of OUTPUT are in the input's order. The command
    checks that all shards are there, once, and were made from the same input with the same options.
    """
    check_target(output, OutputFormat())
    if OutputFormat().of(output) is TREC:
        raise InputError(f"{output}: shards are not ranked; name a .parquet, .csv, .tsv or .jsonl file")
    if output.exists() and not force:
        raise InputError(f"{output} exists already; replace it with --force or name another with -o")
    paths = [path for shard in shards for path in _there(shard)]
    merged = merge(paths, output)
    click.echo(f"{merged.rows:,} rows of {len(paths)} shards are in {output}")
    if merged.row_errors:
        click.echo(f"{merged.row_errors:,} rows have no score; {output}.errors.jsonl says which and why")
        sys.exit(ExitCode.ROW_ERRORS)


def _there(shard: Path) -> list[Path]:
    """The objects that fit a URL with a *, which no shell replaces; else the path itself."""
    is_glob = isinstance(shard, ObjectPath) and "*" in str(shard)
    found = shard.matches() if isinstance(shard, ObjectPath) and is_glob else [shard]
    if not found:
        raise InputError(f"{shard}: no such object")
    return found
