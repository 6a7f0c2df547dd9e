"""run.wait(), and the bar of a run: in Jupyter, and elsewhere only where it is asked for."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

from rankmill import AsyncClient, Client
from rankmill.jobs.contract.errors import RunTimeout
from rankmill.jobs.contract.run import Progress
from rankmill.producer.client.show import as_html, as_text
from tests.conftest import Server
from tests.producer.test_client import PAIRS


@pytest.fixture
def client(shared_queue: Server, tiny_model: Path) -> Client:
    return Client(shared_queue.url, model=str(tiny_model), precision="fp32", chunk_size=16, window=3)


def test_wait_keeps_the_scores(client: Client, capfd: pytest.CaptureFixture[str]) -> None:
    run = client.submit([*PAIRS, (None, "no query")])
    stats = run.wait(timeout=60)
    assert (stats.rows, run.rows, run.progress.rows, list(run.errors)) == (91, 91, 91, [90])
    scores = run.scores()
    np.testing.assert_allclose(scores[:90], client.score(PAIRS, timeout=60), atol=1e-5)
    assert (len(run.scores()), list(scores.errors), run.wait().rows) == (91, [90], 91)
    assert capfd.readouterr() == ("", "")


def test_wait_that_ends_early_goes_on(client: Client) -> None:
    run = client.submit(PAIRS)
    with pytest.raises(RunTimeout):
        run.wait(timeout=0)
    assert run.wait(timeout=60).rows == 90


def test_wait_for_asyncio_and_for_detached_runs(client: Client, shared_queue: Server) -> None:
    async def both() -> Any:
        async with AsyncClient(shared_queue.url, settings=client.settings) as tasks:
            here = await tasks.submit(PAIRS)
            there = await tasks.submit(PAIRS, detached=True)
            counted = [(await run.wait(timeout=60)).rows for run in (here, there)]
            return counted, await here.scores(), await there.scores()

    counted, *found = asyncio.run(both())
    assert counted == [90, 90]
    for scores in found:
        np.testing.assert_allclose(scores, client.score(PAIRS, timeout=60), atol=1e-5)


def test_a_script_shows_a_bar_where_it_asks(client: Client, capfd: pytest.CaptureFixture[str]) -> None:
    client.submit(PAIRS).wait(timeout=60, show_progress=True)
    shown = capfd.readouterr()
    assert (shown.out, "90 of 90 pairs" in shown.err) == ("", True), shown.err


def test_what_a_bar_says() -> None:
    progress = Progress(rows=1500, row_errors=2, since=time.time() - 1, since_rows=500, at=time.time())
    line = "1,500 of 3,500 pairs, 2 without a score, 1,000 pairs/s, 0:00:02 left"
    assert as_text(progress, 3500) == line
    assert as_html(progress, 3500) == f'<progress value="1500" max="3500"></progress> {line}'
    assert as_text(Progress(), None) == "0 pairs"


def test_jupyter_shows_a_bar(
    shared_queue: Server, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    cells = [
        f"from rankmill import Client\nfrom rankmill.producer.client import show\n"
        f"client = Client({shared_queue.url!r}, model={str(tiny_model)!r}, precision='fp32', chunk_size=16)\n"
        "pairs = [('moon', f'passage {n}') for n in range(90)]\nshow._FIRST_SECONDS = 60",
        "scores = client.score(pairs, show_progress=True)",
        "scores = client.score(pairs, show_progress=False)",
        "rank = client.rank('moon', ['a', 'b'])",
        "show._FIRST_SECONDS = 0\nstats = client.submit(pairs).wait()",
        "run = client.submit(pairs)\nscores = run.scores()\nrun",
    ]
    new: Any = nbformat.v4
    notebook = new.new_notebook(cells=[new.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    found = [
        [output["data"].get("text/html", "") for output in cell["outputs"] if "data" in output]
        for cell in notebook.cells
    ]
    bar = '<progress value="90" max="90"></progress> 90 of 90 pairs'
    assert [len(each) for each in found] == [0, 1, 0, 0, 1, 2], notebook.cells
    assert all(bar in html for cell in found for html in cell), found
    assert not any(output["output_type"] == "stream" for cell in notebook.cells for output in cell["outputs"])
