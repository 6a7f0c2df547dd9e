"""The live page has the runs of runners."""

from __future__ import annotations

import re
import time
from pathlib import Path

from rankmill.extensions.runners.store import FileRunStore, RunLease
from rankmill.jobs.contract.file_request import FileOrder, FileRequest
from rankmill.jobs.contract.run import Progress
from rankmill.jobs.contract.spec import ScoreSpec
from tests.conftest import Server, StartExporter
from tests.extensions.page.test_page import text
from tests.harness.browser import shown


def test_submitted_runs_are_rows_and_those_that_ended_long_ago_are_not(
    server: Server, exporters: StartExporter, tmp_path: Path
) -> None:
    store = FileRunStore(server.client, "files", 100_000)
    orders = [
        FileOrder(request=FileRequest(inputs=("/a.csv",), output=f"/{name}.csv"), spec=ScoreSpec(model="m"))
        for name in ("old", "bad", "half", "next")
    ]
    for order in orders:
        store.submit(order)
    for changes in (
        {"state": "done", "ended": time.time() - 7200},
        {"state": "failed", "ended": time.time(), "reason": "no column query"},
        {"state": "running", "runner": "runner-1", "rows": 200, "progress": Progress(rows=50)},
    ):
        claim = store.claim(15)
        assert claim
        lease = RunLease(claim.run.changed(**changes), claim.entry)
        if "ended" in changes:
            store.end(lease)
        else:
            store.renew(lease, 15)
    runs = text(shown(exporters(server.url), tmp_path / "browser"), "runs")
    assert re.search(
        r"/half\.csv\s+m.*25% of 200.*running\s+on runner-1.*/next\.csv.*waiting.*/bad\.csv", runs, re.S
    )
    assert re.search(r"/bad\.csv.*failed\s+no column query", runs, re.S)
    assert "/old.csv" not in runs
