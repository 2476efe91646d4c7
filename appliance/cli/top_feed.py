"""What `appliancectl top` shows: the gateway's stream of events, and applianced's own answers where the gateway gives none."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from appliance.cli.gateway_address import KEY_CURE, address_of
from appliance.cli.place import Place
from appliance.control import client
from appliance.core.errors import ApplianceError

Json = dict[str, Any]
PATH = "/status/events"
SILENT_S = 5.0
"""The gateway says something each second."""
PAUSE_S = 1.0


@dataclass(slots=True)
class View:
    """The newest of everything.

    Attributes:
        now, machine, ladder: as the events of these names (docs/page.md); empty while unknown.
        incidents: newest first.
        step: the last ten seconds of speed.
        cards: PCI address → its newest sample.
        kv_tokens_used: None where the engine does not count them.
        heard_s: when anything was heard last, on the monotonic clock.
        problem: why the gateway says nothing; empty while it does.
    """

    now: Json = field(default_factory=dict)
    machine: Json = field(default_factory=dict)
    ladder: Json = field(default_factory=dict)
    incidents: list[Json] = field(default_factory=list)
    step: Json = field(default_factory=dict)
    cards: dict[str, Json] = field(default_factory=dict)
    kv_tokens_used: int | None = None
    heard_s: float = 0.0
    problem: str = "not asked yet"

    def take(self, event: str, document: Json) -> None:
        """One event of the stream."""
        match event:
            case "now":
                self.now = document
            case "machine":
                self.machine = document
            case "ladder":
                self.ladder = document
            case "incidents":
                self.incidents = document["incidents"]
            case "series":
                self.step = document["steps"][-1]
            case "flight":
                self._take_flight(document)

    def _take_flight(self, document: Json) -> None:
        blocks, block_tokens = document["samples"].get("kv_blocks_used"), document.get("block_tokens")
        if blocks and block_tokens:
            self.kv_tokens_used = blocks[-1] * block_tokens
        for card in document["cards"]:
            newest = {name: column[-1] if isinstance(column, list) else column for name, column in card.items()}
            self.cards[card["address"]] = newest

    def document(self) -> Json:
        """For programs."""
        return {
            "time_s": time.time(), "problem": self.problem, "now": self.now, "machine": self.machine, "ladder": self.ladder,
            "incidents": self.incidents, "speed": self.step, "cards": list(self.cards.values()), "kv_tokens_used": self.kv_tokens_used,
        }  # fmt: skip


class Feed:
    """Keeps a view fresh in a thread of its own; `changed` is set with everything new."""

    def __init__(self, url: str, key: str, place: Place) -> None:
        """Raises ApplianceError where the address is none."""
        self._address = address_of(url)
        self._headers = {"accept": "text/event-stream", **({"authorization": f"Bearer {key}"} if key else {})}
        self._place = place
        self.url = url
        self.view = View()
        self.changed = threading.Event()

    def start(self) -> None:
        """From now on; ends with the process."""
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                for event, document in self._events():
                    self.view.take(event, document)
                    self.view.problem, self.view.heard_s = "", time.monotonic()
                    if event == "now":
                        self.changed.set()
                self.view.problem = f"the gateway at {self.url} ended the connection"
            except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                self.view.problem = _words(self.url, error)
            self._ask_applianced()
            self.changed.set()
            time.sleep(PAUSE_S)

    def _events(self) -> Iterator[tuple[str, Json]]:
        connection = self._connection()
        try:
            connection.request("GET", PATH, headers=self._headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise ValueError(_refusal(answer.status, answer.read(100_000)))
            name = ""
            for line in answer:
                if line.startswith(b"event: "):
                    name = line[7:].strip().decode()
                elif line.startswith(b"data: "):
                    yield name, json.loads(line[6:])
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        host, port = self._address.host, self._address.port
        if not self._address.tls:
            return http.client.HTTPConnection(host, port, timeout=SILENT_S)
        return http.client.HTTPSConnection(host, port, timeout=SILENT_S, context=ssl.create_default_context())

    def _ask_applianced(self) -> None:
        """What it says without a gateway."""
        socket = self._place.control_socket()
        self.view.now = {}
        try:
            self.view.machine = client.ask(socket, "status")
            self.view.ladder = client.ask(socket, "ladder")
            self.view.incidents = client.ask(socket, "timeline", limit=10)["incidents"]
            self._take_newest(client.ask(socket, "flight", since_s=time.time() - 5))
            self.view.heard_s = time.monotonic()
        except ApplianceError as error:
            self.view.problem += f"; {error.message}"

    def _take_newest(self, flight: Json) -> None:
        self.view.take("flight", flight)


def _refusal(status: int, body: bytes) -> str:
    """In its own words, but for how a key is sent: that is our business."""
    try:
        words = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"it answered {status}"
    return f"{words.partition('; ')[0]}; {KEY_CURE}" if status == 401 else words


def _words(url: str, error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"the gateway at {url} has been silent for {SILENT_S:g} s"
    reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
    return f"the gateway at {url}: {reason}"
