"""Sends many requests at once from one asyncio process, over a few connections.

python examples/asyncio_producer.py redis://localhost:6379/0
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time

from rankmill import AsyncClient

REQUESTS = 50
PASSAGES = [f"The moon is {number},400 km away." for number in range(370, 390)]


async def main(url: str, model: str = "demo") -> None:
    """Send all requests at once, and print how long they took."""
    latencies: list[float] = []

    async with AsyncClient(url, model=model) as client:

        async def request(number: int) -> int:
            started = time.perf_counter()
            best = await client.rank(f"how far is moon {number}", PASSAGES, top_k=1, timeout=120)
            latencies.append(time.perf_counter() - started)
            return best[0].index

        best = await asyncio.gather(*map(request, range(REQUESTS)))
    print(
        f"{len(best)} requests of {len(PASSAGES)} pairs, half of them in {statistics.median(latencies):.2f} s"
    )


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3]))
