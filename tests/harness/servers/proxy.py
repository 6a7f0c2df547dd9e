"""A TCP proxy that misbehaves on command: between rankmill's processes and a real server."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from types import TracebackType


class Proxy:
    """Forwards a TCP port to a Unix socket or to ``HOST:PORT``, from a thread of its own.

    Set ``refuse`` to take no new connections, ``delay`` for seconds before each reply,
    ``cut_after`` to close a connection in the middle of a reply after about so many bytes; call
    `drop` to close all connections now.
    """

    def __init__(self, socket: str, seed: int = 1) -> None:
        self.refuse = False
        self.delay = 0.0
        self.cut_after: int | None = None
        self.cuts = 0
        self._socket = socket
        self._random = random.Random(seed)
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(
            target=self._loop.run_until_complete, args=(self._serve(),), daemon=True
        )

    def __enter__(self) -> Proxy:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def drop(self) -> None:
        """Close every connection."""
        self._loop.call_soon_threadsafe(self._close_all)

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        self._close_all()
        await asyncio.sleep(0.05)  # connections notice

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuse:
            writer.transport.abort()
            return
        with contextlib.suppress(OSError):
            up_reader, up_writer = await self._connect_up()
            self._writers |= {writer, up_writer}
            await asyncio.gather(self._pump(reader, up_writer, False), self._pump(up_reader, writer, True))

    async def _connect_up(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if "/" in self._socket:
            return await asyncio.open_unix_connection(self._socket)
        host, _, port = self._socket.rpartition(":")
        return await asyncio.open_connection(host, int(port))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, reply: bool) -> None:
        limit = self.cut_after and self._random.randint(1, 2 * self.cut_after)
        passed = 0
        with contextlib.suppress(OSError, asyncio.CancelledError):
            while data := await reader.read(1 << 16):
                if reply and self.delay:
                    await asyncio.sleep(self.delay)
                passed += len(data)
                if reply and limit and passed > limit and self.cut_after:
                    writer.write(data[: len(data) // 2])
                    await writer.drain()
                    self.cuts += 1
                    break
                writer.write(data)
                await writer.drain()
        writer.transport.abort()
        self._writers.discard(writer)

    def _close_all(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()
