"""One kernel log, several who listen."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from appliance.gpu.kernel_ears import KernelEars
from appliance.gpu.kernel_line import KernelLine
from appliance.gpu.kernel_log import KernelLog


async def test_every_ear_hears_every_line_once(tmp_path: Path) -> None:
    """Those too that were read before it listened; whoever has stopped hears no more, and takes nothing from the others."""
    fifo = tmp_path / "kmsg"
    os.mkfifo(fifo)
    writer = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
    ears = KernelEars(KernelLog(str(fifo)))
    first, second = ears.ear(), ears.ear()
    heard: dict[str, list[str]] = {"first": [], "second": []}

    def listener(name: str) -> Callable[[Sequence[KernelLine]], None]:
        def listen(lines: Sequence[KernelLine]) -> None:
            heard[name] += [line.text for line in lines]

        return listen

    os.write(writer, b"from before\n")
    first.start(listener("first"))
    assert heard == {"first": ["from before"], "second": []}
    second.start(listener("second"))
    assert heard["second"] == ["from before"]
    os.write(writer, b"news\n")
    first.drain()
    assert heard == {"first": ["from before", "news"], "second": ["from before", "news"]}
    first.stop()
    os.write(writer, b"later\n")
    async with asyncio.timeout(5):
        while heard["second"][-1] != "later":
            await asyncio.sleep(0.01)
    assert heard["first"][-1] == "news"
    assert second.problem is None
    assert second.boot_id == ears.log.boot_id
    ears.stop()
    os.close(writer)
