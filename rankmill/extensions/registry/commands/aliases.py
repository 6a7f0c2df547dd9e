"""``rankmill models alias``, ``promote``, ``rollback`` and ``remove``: change a registry."""

from __future__ import annotations

import click

from rankmill.cli import options
from rankmill.cli.show import echo
from rankmill.cluster.orders import OrderOutcome
from rankmill.extensions.registry.aliases import promote as promote_version
from rankmill.extensions.registry.aliases import remove_version, roll_back, set_alias, target
from rankmill.extensions.registry.documents import Reference, check_name, parse_reference
from rankmill.extensions.registry.registry import Registry, who
from rankmill.jobs.runtime.settings import Settings

_WARM_SECONDS = 600


def _shares(context: click.Context, option: click.Parameter, given: tuple[str, ...]) -> dict[str, float]:
    shares: dict[str, float] = {}
    for text in given:
        version, _, share = text.partition("=")
        try:
            shares[version] = float(share)
        except ValueError:
            raise click.BadParameter(f"{text!r} is not of the form VERSION=SHARE, such as v4=0.1") from None
        if not 0 < shares[version] < 1:
            raise click.BadParameter(f"{text!r}: a share is more than 0 and less than 1")
    return shares


_split = click.option("--split", "others", multiple=True, metavar="VERSION=SHARE", callback=_shares,
                      help="Share of the queries that another version scores, such as v4=0.1.")  # fmt: skip
_SHADOW = "A version that scores the same queries, but whose scores are not returned."
_shadow = click.option("--shadow", metavar="VERSION", help=_SHADOW)


@options.command("alias")
@click.argument("model", metavar="NAME@VERSION")
@click.argument("word", metavar="as", type=click.Choice(["as"]))
@click.argument("alias", metavar="ALIAS")
@_split
@_shadow
@options.settings("registry")
def alias(
    model: str, word: str, alias: str, others: dict[str, float], shadow: str | None, settings: Settings
) -> None:
    """Let ALIAS stand for a version, from the next run on.

    With --split, ALIAS stands for several versions. The text of a query decides which version scores it, so
    the same query always gets the same version.
    """
    registry = Registry.of(settings)
    version = registry.version(parse_reference(model))
    called = Reference(version.name, check_name(alias, "an alias"))
    changed = set_alias(registry, called, target(registry, version, others, shadow, by=who()))
    echo(f"{called} stands for {changed.now}")


@options.command("promote")
@click.argument("model", metavar="NAME@VERSION")
@click.option("--alias", required=True, metavar="ALIAS", help="The alias that is to stand for the version.")
@_split
@_shadow
@click.option("--wait", "wait_seconds", type=click.FloatRange(min=1), default=_WARM_SECONDS,
              metavar="SECONDS",
              help=f"Longest wait for each version.  [default: {_WARM_SECONDS}]")  # fmt: skip
@options.settings("registry", "redis_url")
def promote(
    model: str, alias: str, others: dict[str, float], shadow: str | None, wait_seconds: float,
    settings: Settings,
) -> None:  # fmt: skip
    """Load a version on all live workers, then let ALIAS stand for it.

    If a worker cannot load the version, ALIAS stays as it is. Runs that have begun keep their version.
    """
    registry = Registry.of(settings)
    version = registry.version(parse_reference(model))
    called = Reference(version.name, check_name(alias, "an alias"))
    wanted = target(registry, version, others, shadow, by=who())

    def said(outcome: OrderOutcome) -> None:
        echo(f"{outcome.worker}: {outcome.text}", err=outcome.state != "done")

    client = options.connection(settings)
    changed = promote_version(registry, called, wanted, client, wait_seconds=wait_seconds, on_outcome=said)
    echo(f"{called} stands for {changed.now}")


@options.command("rollback")
@click.argument("alias", metavar="NAME@ALIAS")
@options.settings("registry")
def rollback(alias: str, settings: Settings) -> None:
    """Return an alias to its previous version."""
    registry = Registry.of(settings)
    called = parse_reference(alias)
    echo(f"{called} stands for {roll_back(registry, called, by=who()).now}")


@options.command("remove")
@click.argument("model", metavar="NAME@VERSION")
@options.settings("registry", "redis_url")
def remove(model: str, settings: Settings) -> None:
    """Remove a version, or an alias.

    A version is not removed while an alias stands for it or a run of the server uses it. The name of a
    removed version is not used again.
    """
    registry = Registry.of(settings)
    named = parse_reference(model)
    if registry.find_alias(named) is not None:
        registry.remove_alias(named)
        echo(f"removed alias {named}")
        return
    client = options.connection(settings) if settings.redis_url else None
    removed = remove_version(registry, named, client, by=who())
    echo(f"removed {removed}")
    if client is None:
        echo("warning: without --redis or REDIS_URL, runs that use it were not looked for", err=True)
