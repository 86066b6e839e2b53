"""A TCP proxy that loses the reply of a command after the server has run it."""

from __future__ import annotations

import asyncio
from types import TracebackType
from urllib.parse import urlsplit


class CuttingProxy:
    """Forwards to the server at ``url``; an async context manager.

    Attributes:
        url: where clients connect to.
        cuts: how many of the next commands with ``marker`` lose their reply and their connection.
        lost: how many replies were lost.
        seen: how many commands with ``marker`` came; ``came`` is set with each.
        slow_s: for how long every reply is held up.
    """

    def __init__(self, url: str, marker: bytes) -> None:
        self.cuts = 0
        self.lost = 0
        self.seen = 0
        self.came = asyncio.Event()
        self.slow_s = 0.0
        self.url = ""
        self._marker = marker
        self._port = urlsplit(url).port
        self._pumps: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> CuttingProxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"redis://127.0.0.1:{port}/0"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._pumps.add(task)
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._port)
        cut = asyncio.Event()
        try:
            requests = self._requests(reader, server_writer, cut)
            replies = self._replies(server_reader, writer, cut)
            pumps = {asyncio.create_task(requests), asyncio.create_task(replies)}
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        finally:
            writer.transport.abort()
            server_writer.transport.abort()

    async def _requests(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, cut: asyncio.Event
    ) -> None:
        while data := await source.read(1 << 16):
            if self._marker in data:
                self.seen += 1
                self.came.set()
                if self.cuts:
                    self.cuts -= 1
                    cut.set()
            target.write(data)
            await target.drain()

    async def _replies(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, cut: asyncio.Event
    ) -> None:
        while data := await source.read(1 << 16):
            if cut.is_set():
                self.lost += 1
                return
            await asyncio.sleep(self.slow_s)
            target.write(data)
            await target.drain()
