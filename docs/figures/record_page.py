"""Photograph the live page: docs/images/page-busy.png, page-idle.png (dark) and page-phone.png.

python -m docs.figures.record_page
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from benchmarks.simulated import SimulatedCluster, collect, endless_pairs, simulated_cluster
from rankmill import Client

IMAGES = Path(__file__).resolve().parents[1] / "images"
_SECONDS = 90
"""How long the cluster works before it is photographed: the plots show it."""


def main() -> None:
    """Let six workers score two runs beside requests, lose one of them, and photograph that."""
    with simulated_cluster(6, 1.0) as cluster, tempfile.TemporaryDirectory() as folder:
        command = [str(Path(sys.executable).parent / "rankmill"), "exporter", "--redis", cluster.url]
        with subprocess.Popen(
            [*command, "--address", "127.0.0.1:9817"], stderr=subprocess.PIPE, text=True
        ) as exporter:
            assert exporter.stderr is not None
            url = next(
                found[0] for line in exporter.stderr if (found := re.search(r"http://[\d.:]+/?", line))
            )
            try:
                _photograph(url, folder, "page-idle", 1440, 900, "--blink-settings=preferredColorScheme=0")
                _work(cluster)
                _photograph(url, folder, "page-busy", 1440, 1500)
                _photograph(url, folder, "page-phone", 500, 1800)
            finally:
                exporter.terminate()


def _work(cluster: SimulatedCluster) -> None:
    client = Client(cluster.url, model="demo", chunk_size=1000)
    for _ in range(2):
        threading.Thread(target=collect, args=(client.submit(endless_pairs()),), daemon=True).start()
    ends = time.monotonic() + _SECONDS
    while (left := ends - time.monotonic()) > 0:
        client.score([(f"request {left}", f"passage {number}") for number in range(20)], timeout=60)
        if left < 20 and len(cluster.workers) == 6:
            cluster.workers.popitem()[1].kill()
        time.sleep(0.5)


def _photograph(url: str, folder: str, name: str, width: int, height: int, *options: str) -> None:
    words = [
        "chromium",
        "--headless",
        "--no-sandbox",
        f"--user-data-dir={folder}/browser",
        "--hide-scrollbars",
        *options,
    ]
    picture = [
        f"--window-size={width},{height}",
        f"--screenshot={IMAGES / name}.png",
        "--virtual-time-budget=8000",
    ]
    subprocess.run([*words, *picture, url], check=True, capture_output=True, timeout=120)


if __name__ == "__main__":
    main()
