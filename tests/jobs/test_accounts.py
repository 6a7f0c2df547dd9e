"""The accounts: what a result has used counts once, whatever is repeated, killed or lost."""

from __future__ import annotations

import pytest
from redis.exceptions import OutOfMemoryError

from rankmill.jobs.contract.priority import Tenant
from rankmill.jobs.contract.results import NO_DEVICE, NOTHING, Amounts, ChunkFailure
from rankmill.jobs.contract.run import Progress, Run, new_run
from rankmill.jobs.contract.spec import ScoreSpec
from rankmill.jobs.protocol import accounts
from rankmill.jobs.protocol.accounts import END, Entry, read_accounts
from rankmill.jobs.protocol.runs import RunStore
from tests.conftest import Server

SOME, MORE = Amounts(10, 100, 5_000, 1, 2), Amounts(30, 300, 9_000, 1, 2)


def begun(store: RunStore, tenant: str = "shop", model: str = "m") -> Run:
    store.accountant.know(tenant)
    run = new_run(ScoreSpec(model=model), queue="q", ttl=100, max_retries=1, tenant=Tenant(tenant))
    store.restore(run)
    return run


def result(store: RunStore, run: Run) -> str:
    """The entry of a result in a run's stream."""
    store.write_result(run, ChunkFailure(chunk=0, message="bad", fatal=False))
    return store.results(run, block_ms=1)[-1][0]


def entries(server: Server) -> list[Entry]:
    return read_accounts(server.client, 2)


def counted(server: Server) -> Amounts:
    total = NOTHING
    for entry in entries(server):
        total = total.plus(entry.amounts)
    return total


def test_a_transaction_that_is_repeated_counts_once(server: Server) -> None:
    """Shows: a transaction is repeated because its reply was lost."""
    store = RunStore(server.client)
    run = begun(store)
    first, second = result(store, run), result(store, run)
    for _ in range(2):  # as after a reply that was lost
        store.forget(run, [], [first], Progress(), used={first: {"H100": SOME, "cpu": SOME}})
    assert counted(server) == SOME.plus(SOME)
    assert {(entry.tenant, entry.model, entry.device) for entry in entries(server)} == {
        ("shop", "m", "H100"),
        ("shop", "m", "cpu"),
    }
    rest = Amounts(cached=3, failed=1)
    for _ in range(2):
        store.delete(run, [], used={first: {"H100": SOME}, second: {"H100": MORE}, END: {NO_DEVICE: rest}})
    assert counted(server) == SOME.plus(SOME).plus(MORE).plus(rest)
    assert not list(server.client.scan_iter("rankmill:run:*"))
    assert all(server.client.ttl(key) > 399 * 86400 for key in server.client.scan_iter("rankmill:usage*"))


def test_results_that_stay_count_once_whoever_reads_them(server: Server) -> None:
    stores = RunStore(server.client), RunStore(server.client)
    run = begun(stores[0])
    first, second = result(stores[0], run), result(stores[0], run)
    stores[0].note(run, Progress(), {first: {"cpu": SOME}})
    for store in stores:
        store.note(run, Progress(), {first: {"cpu": SOME}, second: {"cpu": MORE}, END: {NO_DEVICE: SOME}})
    assert counted(server) == SOME.plus(MORE).plus(SOME)
    assert len(stores[0].results(run, block_ms=1)) == 2
    assert all(0 < server.client.ttl(key) <= run.ttl for key in server.client.scan_iter("rankmill:run:*"))


def test_a_run_that_has_ended_counts_nothing_more(server: Server) -> None:
    store = RunStore(server.client)
    run = begun(store)
    entry = result(store, run)
    store.cancel(run)
    store.forget(run, [], [entry], Progress(), used={entry: {"cpu": SOME}})
    store.delete(run, [], used={entry: {"cpu": SOME}, END: {NO_DEVICE: SOME}})
    assert entries(server) == []


def test_a_day_has_room_for_so_many_and_the_rest_is_added_up(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounts, "MOST_ENTRIES", 3)
    store = RunStore(server.client)
    for number in range(6):
        run = begun(store, f"tenant {number}")
        store.delete(run, [], used={END: {"cpu": SOME}})
    found = entries(server)
    assert sorted(entry.tenant for entry in found if not entry.other) == ["tenant 0", "tenant 1", "tenant 2"]
    assert [entry.amounts.pairs for entry in found if entry.other] == [3 * SOME.pairs]
    assert len(read_accounts(server.client, 2, "tenant 1")) == 1


def test_accounts_that_are_damaged_keep_no_run_from_its_end(server: Server) -> None:
    """Shows: an account's key is damaged."""
    store = RunStore(server.client)
    for number in range(2):
        run = begun(store)
        if not number:
            store.delete(run, [], used={END: {"cpu": SOME}})
            (day,) = server.client.scan_iter("rankmill:usage:*")
            server.client.set(day, "no hash")
            continue
        store.delete(run, [], used={END: {"cpu": SOME}})
        assert not store.exists(run.id)


def test_runs_end_and_are_counted_on_a_full_server(server: Server) -> None:
    """Shows: the server or its disk is full."""
    store = RunStore(server.client)
    ended, cancelled = begun(store), begun(store)
    entry = result(store, ended)
    server.client.config_set("maxmemory", 1)
    try:
        with pytest.raises(OutOfMemoryError):
            server.client.set("k", "v")
        store.delete(ended, [], used={entry: {"cpu": SOME}, END: {NO_DEVICE: SOME}})
        store.cancel(cancelled)
    finally:
        server.client.config_set("maxmemory", 0)
    assert counted(server) == SOME.plus(SOME)
    assert not store.exists(ended.id)
    assert not store.exists(cancelled.id)
    assert store.was_cancelled(cancelled)
