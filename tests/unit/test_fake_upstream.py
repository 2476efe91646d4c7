"""The upstream that gateways are measured with, as other gateways meet it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.fakes.upstream import Stats, Upstream


async def test_who_asks_for_http_2_is_hung_up_on() -> None:
    """sglang-router does, to learn whether its worker speaks gRPC: no error of ours in the middle of a measurement, and no request."""
    stats = Stats(200, "t")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "socket"
        server = await asyncio.get_running_loop().create_unix_server(lambda: Upstream(stats), path)
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        server.close()
    assert (stats.requests, stats.open) == (0, 0)
