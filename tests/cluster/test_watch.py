"""What a package adds to what is shown of a cluster: one that fails is a fault, and all else is shown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import PrivateAttr

from rankmill import plugins
from rankmill.cli.main import rankmill
from rankmill.cluster.exporter import ClusterView, exporter_app, exporter_registry
from rankmill.cluster.snapshot import read_cluster
from rankmill.cluster.verdict import fault_kinds, verdict
from rankmill.cluster.watch import ClusterFault, Gauge, Seen, Watch
from rankmill.jobs.contract.errors import ConfigError, RedisUnavailable
from rankmill.jobs.runtime.connection import impatient
from rankmill.jobs.runtime.settings import load_settings
from tests.conftest import Server


class Odd(Seen):
    """Has a fault whose kind its watch does not name."""

    def faults(self) -> Iterator[ClusterFault]:
        yield ClusterFault(kind="odd", text="odd", remedy="none")


class Plots(Seen):
    """Has gauges."""

    _shown: list[Gauge] = PrivateAttr(default_factory=list)

    def gauges(self) -> list[Gauge]:
        return self._shown


class Gauges(Watch):
    """Has gauges, also before it has looked."""

    def __init__(self, *gauges: Gauge) -> None:
        self.nothing = plots = Plots()  # type: ignore[misc]
        plots._shown.extend(gauges)


class Raises(Watch):
    """Fails whatever it is asked."""

    kinds: ClassVar[Mapping[str, str]] = {"mine": "no_such_kind"}

    def read(self, *about: Any) -> Any:
        raise RuntimeError("its own bug")

    find = runs = pages = read  # type: ignore[assignment]


class LosesRedis(Watch):
    """Reads while Redis is away, with a client that waits."""

    def read(self, *about: Any) -> Any:
        raise RedisUnavailable("Redis is away")


class SeesOdd(Watch):
    """Reads what has a fault of an unknown kind."""

    nothing: ClassVar[Seen] = Odd()


@pytest.fixture
def add(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Adds a watch of another package, or an error of its import."""
    installed = list(plugins.load_each("rankmill.watch"))

    def install(watch: object) -> None:
        added = [*installed, ("stranger", "its-package", watch)]
        monkeypatch.setattr("rankmill.cluster.watch.load_each", lambda seam: added)

    return install


@pytest.mark.parametrize(
    ("watch", "reason"),
    [
        (Raises(), "RuntimeError: its own bug"),
        (SeesOdd(), "odd is not among the kinds of its faults"),
        (Raises, "not an object of a Watch"),
        (ConfigError("cannot be imported"), "cannot be imported"),
    ],
)
def test_a_watch_that_fails_is_a_fault_and_all_else_is_shown(
    watch: object, reason: str, server: Server, add: Any, caplog: pytest.LogCaptureFixture
) -> None:
    add(watch)
    (fault,) = verdict(read_cluster(server.client)).faults
    assert (fault.kind, fault.text.partition(": ")[0]) == (
        "extension", "Extension stranger cannot show the cluster",
    )  # fmt: skip
    assert reason in fault.text
    registry = exporter_registry(ClusterView(server.client))
    assert registry.get_sample_value("rankmill_faults", {"kind": "extension"}) == 1
    exporter_app(impatient(server.client), load_settings())
    for command in ("status", "status abc", "runs", "cancel abc"):
        done = CliRunner().invoke(rankmill, [*command.split(), "--redis", server.url])
        assert done.exit_code == (2 if "abc" in command else 0), done.output
    told = {each.getMessage() for each in caplog.records if each.name.startswith("rankmill.cluster")}
    warning = "extension stranger fails and is left out: RuntimeError: its own bug"
    assert told == ({warning} if isinstance(watch, Raises) else set())


def test_no_extension_is_to_blame_for_a_server_that_is_away(server: Server, add: Any) -> None:
    add(LosesRedis())
    with pytest.raises(RedisUnavailable):
        read_cluster(server.client)


@pytest.mark.parametrize(
    ("gauge", "reason"),
    [
        (Gauge("its pairs", "Pairs.", (), {(): 1}), "gauge 'its pairs' or one of its labels has a name"),
        (Gauge("its_pairs", "Pairs.", ("a b",), {("x",): 1}), "gauge 'its_pairs' or one of its labels"),
        (Gauge("its_pairs", "Pairs.", ("a",), {("x", "y"): 1}), "samples without a value for each label"),
        (Gauge("its_pairs", "Pairs.", (), {(): "many"}), "could not convert string to float"),  # type: ignore[dict-item]
        (Gauge("rankmill_workers", "Its own.", (), {(): 1}), ""),
    ],
)
def test_a_gauge_that_prometheus_refuses_leaves_all_others(
    gauge: Gauge, reason: str, server: Server, add: Any
) -> None:
    add(Gauges(gauge))
    registry = exporter_registry(ClusterView(server.client))
    text = generate_latest(registry).decode()
    names = [family.name for family in text_string_to_metric_families(text)]
    assert len(names) == len(set(names))
    assert registry.get_sample_value("rankmill_redis_up") == 1
    assert registry.get_sample_value("rankmill_workers", {"state": "idle"}) == 0
    faults = verdict(read_cluster(server.client)).faults
    assert [reason in fault.text for fault in faults] == [True] * bool(reason)


def test_a_kind_that_is_just_worse_than_an_unknown_one_is_the_last(add: Any) -> None:
    add(Raises())
    assert fault_kinds()[-1] == "mine"
