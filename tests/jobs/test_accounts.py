"""The accounts: each report counts once, whatever is repeated, killed, expired or lost."""

from __future__ import annotations

import pytest
from redis.exceptions import OutOfMemoryError

from rankmill.jobs.contract import keys
from rankmill.jobs.contract.priority import Tenant
from rankmill.jobs.contract.run import Progress, Run, new_run
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.contract.usage import NOTHING, Amounts
from rankmill.jobs.protocol import accounts
from rankmill.jobs.protocol.accounts import Entry, RunUsage, read_accounts
from rankmill.jobs.protocol.runs import RunStore
from tests.conftest import Server

SOME, MORE = Amounts(10, 100, 5_000, 1, 2), Amounts(30, 300, 9_000, 1, 2)


def begun(store: RunStore, tenant: str = "shop", model: str = "m") -> Run:
    store.accountant.know(tenant)
    run = new_run(ScoreSpec(model=model), queue="q", ttl=100, max_retries=1, tenant=Tenant(tenant))
    store.restore(run)
    return run


def entries(server: Server) -> list[Entry]:
    return list(read_accounts(server.client, 2).entries)


def counted(server: Server) -> Amounts:
    total = NOTHING
    for entry in entries(server):
        total = total.plus(entry.amounts)
    return total


def test_a_transaction_that_is_repeated_counts_once(server: Server) -> None:
    store = RunStore(server.client)
    run = begun(store)
    for _ in range(2):  # as after a reply that was lost
        store.note(run, Progress(), RunUsage(run, {"H100": SOME}))
    assert counted(server) == SOME
    for _ in range(2):
        store.delete(run, [], usage=RunUsage(run, {"H100": MORE}))
    assert counted(server) == MORE
    (entry,) = entries(server)
    assert (entry.tenant, entry.model, entry.device) == ("shop", "m", "H100")
    assert not list(server.client.scan_iter("rankmill:run:*"))
    assert all(server.client.ttl(key) > 399 * 86400 for key in server.client.scan_iter("rankmill:usage*"))


def test_a_run_that_has_ended_counts_nothing_more(server: Server) -> None:
    store = RunStore(server.client)
    run = begun(store)
    store.delete(run, [])
    store.cancel(run)  # somebody has seen it just before
    store.note(run, Progress(), RunUsage(run, {"cpu": SOME}))
    assert entries(server) == []


@pytest.mark.parametrize("told", [True, False])
def test_a_run_that_another_cancels_counts_once_what_its_producer_has(server: Server, told: bool) -> None:
    store = RunStore(server.client)
    run = begun(store)
    if told:
        store.note(run, Progress(), RunUsage(run, {"cpu": SOME}))
    store.cancel(run)
    assert not store.exists(run.id)
    assert all(0 < server.client.ttl(key) <= run.ttl for key in server.client.scan_iter("rankmill:run:*"))
    store.note(run, Progress(), RunUsage(run, {"cpu": SOME}))
    for _ in range(2):  # as after a reply that was lost
        store.delete(run, [], usage=RunUsage(run, {"cpu": MORE}))
        assert counted(server) == MORE
    assert not list(server.client.scan_iter("rankmill:run:*"))


def test_a_run_whose_keys_expired_is_not_counted_anew(server: Server) -> None:
    store = RunStore(server.client)
    run = begun(store)
    usage = RunUsage(run, {"cpu": SOME})
    store.note(run, Progress(), usage)
    server.client.unlink(*keys.of_run(run.id))
    store.restore(run)
    usage.total = {"cpu": MORE}
    store.note(run, Progress(), usage)
    assert counted(server) == MORE


def test_what_a_server_has_lost_is_told_and_counted_again_where_a_run_goes_on(server: Server) -> None:
    store, other = RunStore(server.client), RunStore(server.client)
    ended, run, late = begun(store), begun(store), begun(other)
    store.delete(ended, [], usage=RunUsage(ended, {"cpu": SOME}))
    usage, usage_of_late = RunUsage(run, {"cpu": SOME}), RunUsage(late, {"cpu": SOME})
    store.note(run, Progress(), usage)
    other.note(late, Progress(), usage_of_late)
    assert read_accounts(server.client, 1).lost == 0
    server.client.flushall()
    for client, each, has in ((store, run, usage), (other, late, usage_of_late)):
        client.restore(each)
        has.total = {"cpu": MORE}
        client.note(each, Progress(), has)
    assert counted(server) == MORE.plus(MORE)  # what had ended is missing
    assert read_accounts(server.client, 1).lost == 2


def test_a_server_that_goes_back_a_little_is_noticed(server: Server) -> None:
    store = RunStore(server.client)
    run = begun(store)
    usage = RunUsage(run, {"cpu": SOME})
    store.note(run, Progress(), usage)
    names = [key for key in server.client.scan_iter("rankmill:*") if b"usage" in key or b"counted" in key]
    saved = {key: server.client.dump(key) for key in names}
    usage.total = {"cpu": MORE}
    store.note(run, Progress(), usage)
    for key, value in saved.items():
        assert value is not None
        server.client.restore(key, 0, value, replace=True)
    assert counted(server) == SOME
    usage.total = {"cpu": MORE.plus(Amounts(pairs=1))}
    store.note(run, Progress(), usage)
    assert counted(server) == MORE.plus(Amounts(pairs=1))
    assert read_accounts(server.client, 1).lost == 1


def test_a_day_has_room_for_so_many_and_the_rest_is_added_up(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounts, "MOST_ENTRIES", 3)
    store = RunStore(server.client)
    for number in range(6):
        run = begun(store, f"tenant {number}")
        store.delete(run, [], usage=RunUsage(run, {"cpu": SOME}))
    found = entries(server)
    assert sorted(entry.tenant for entry in found if not entry.other) == ["tenant 0", "tenant 1", "tenant 2"]
    assert [entry.amounts.pairs for entry in found if entry.other] == [3 * SOME.pairs]
    assert len(list(read_accounts(server.client, 2, "tenant 1").entries)) == 1


def test_accounts_that_are_damaged_keep_no_run_from_its_end(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    store = RunStore(server.client)
    run = begun(store)
    server.client.set(keys.usage(), "no hash")
    store.delete(run, [], usage=RunUsage(run, {"cpu": SOME}))
    assert not store.exists(run.id)
    assert "what runs use is not counted: the accounts in Redis are damaged" in caplog.text


def test_runs_end_and_are_counted_on_a_full_server(server: Server) -> None:
    store = RunStore(server.client)
    ended, cancelled = begun(store), begun(store)
    server.client.config_set("maxmemory", 1)
    try:
        with pytest.raises(OutOfMemoryError):
            server.client.set("k", "v")
        store.delete(ended, [], usage=RunUsage(ended, {"cpu": SOME}))
        store.cancel(cancelled)
    finally:
        server.client.config_set("maxmemory", 0)
    assert counted(server) == SOME
    assert not store.exists(ended.id)
    assert not store.exists(cancelled.id)
    assert store.was_cancelled(cancelled)
    store.delete(cancelled, [], usage=RunUsage(cancelled, {"cpu": SOME}))
    assert counted(server) == SOME.plus(SOME)
