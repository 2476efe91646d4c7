"""What is one answer, whatever the engine does around it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from appliance.gateway.exchange import Exchange
from appliance.gateway.notes import Notes
from appliance.gateway.upstream import LossKind, UpstreamLost


class DyingEngine:
    """Gives its whole answer and is gone before the end of the stream that carried it."""

    def __init__(self) -> None:
        self._said = [b':whole 200\ndata: {"text":"ten"}\n\n']

    async def read(self) -> bytes | None:
        """The next piece."""
        if self._said:
            return self._said.pop()
        raise UpstreamLost(LossKind.RESET, "killed")


class OneAnswer:
    """A client that keeps what it is answered."""

    def __init__(self) -> None:
        self.status = 0
        self.answers: list[tuple[int, bytes]] = []

    def stop_comments(self) -> None:
        """Nothing was said yet."""

    async def answer(self, status: int, headers: Any, body: bytes) -> None:
        """Whole."""
        self.status = status
        self.answers.append((status, body))


async def test_an_engine_that_dies_behind_a_whole_answer_has_lost_nothing() -> None:
    """Else it would be asked again, and the second answer would break the connection on which the client asks its next question."""
    client, request = OneAnswer(), SimpleNamespace(notes=Notes(), got_further=True, sent_bytes=0, path="/v1/completions")
    await Exchange._pass_noted(SimpleNamespace(), request, client, DyingEngine())
    assert client.answers == [(200, b'{"text":"ten"}')]
