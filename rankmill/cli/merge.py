"""``rankmill merge``: joins the outputs of shards into one."""

from __future__ import annotations

import glob
import sys

import click

from rankmill.cli import options
from rankmill.cli.show import echo
from rankmill.cli.standard_output import new_table
from rankmill.jobs.contract.errors import ExitCode
from rankmill.jobs.contract.shown import unscored
from rankmill.producer.files.formats.parquet import PARQUET
from rankmill.producer.files.inputs import without_hidden
from rankmill.producer.files.shards import merge
from rankmill.producer.files.stores.paths import AnyPath, matches


@options.command("merge")
@click.argument("shards", nargs=-1, required=True, type=options.PATH, metavar="SHARD...")
@options.of(options.NewTable)
@options.force
def merge_shards(shards: tuple[AnyPath, ...], asked: options.NewTable, force: bool) -> None:
    """Merge the outputs of score-file --shard.

    SHARDS are the outputs of --shard 1/N to N/N; the rows of OUTPUT are in the input's order. The command
    checks that each shard is there exactly once, and that all were made from the same input with the same
    options.
    """
    paths = [path for shard in shards for path in _there(shard)]
    with new_table(asked, PARQUET, "shards are not ranked", force=force) as (output, form):
        rows, row_errors = merge(paths, output, form)
    pipes = output != asked.output
    place = "on standard output" if pipes else f"in {output}"
    echo(f"{rows:,} rows of {len(paths)} shards are {place}", err=pipes)
    if row_errors:
        why = "" if pipes else f"; {output}.errors.jsonl says which and why"
        echo(unscored(row_errors) + why, err=pipes)
        sys.exit(ExitCode.ROW_ERRORS)


def _there(shard: AnyPath) -> list[AnyPath]:
    """Return the files that match a pattern such as ``s3://bucket/part-*``, because shells do not expand
    patterns in URLs. Returns `shard` itself if it is not a pattern, if it exists, or if nothing matches it.
    """
    if not glob.has_magic(str(shard)) or shard.exists():
        return [shard]
    return without_hidden(matches(shard), shard) or [shard]
