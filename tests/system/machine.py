"""What the tests do with a machine that has the package: its commands, its units, its clients."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.system.box import Box, wait_until

SUPERVISOR = "llm-appliance.service"
GATEWAY = "llm-appliance-gateway.service"
CARDS = "llm-appliance-cards.service"
SOCKET = "llm-appliance-gateway.socket"
URL = "http://127.0.0.1:8000"
MODEL = "SmolLM2-135M-Instruct"
LOAD_PROGRAM = Path(__file__).with_name("load.py")


def chat_command(question: str, *, max_tokens: int = 24) -> tuple[str, ...]:
    """What a person would type."""
    body = {"model": MODEL, "max_tokens": max_tokens, "temperature": 0, "messages": [{"role": "user", "content": question}]}
    headers = ("-H", "Content-Type: application/json")
    curl = ("curl", "--silent", "--show-error", "--fail-with-body", "--max-time", "180")
    return (*curl, f"{URL}/v1/chat/completions", *headers, "-d", json.dumps(body))


def answer_in(output: str) -> str:
    """The text of a chat completion."""
    return str(json.loads(output)["choices"][0]["message"]["content"])


class Machine:
    """One box, by its owner's words."""

    def __init__(self, box: Box) -> None:
        self.box = box

    def apt(self, *arguments: str, timeout_s: float = 300.0) -> str:
        """apt-get, without a terminal; conffiles that were edited are kept."""
        options = ("-y", "-q", "--allow-downgrades", "-o", "Dpkg::Options::=--force-confold")
        return self.box.do("apt-get", *options, *arguments, timeout_s=timeout_s)

    def systemctl(self, *arguments: str, timeout_s: float = 120.0) -> str:
        """systemctl."""
        return self.box.do("systemctl", *arguments, timeout_s=timeout_s)

    def ctl(self, *arguments: str, timeout_s: float = 120.0) -> str:
        """appliancectl, where it has to succeed."""
        return self.box.do("appliancectl", *arguments, timeout_s=timeout_s)

    def status(self) -> dict[str, Any]:
        """What applianced says; empty where it does not answer."""
        ended = self.box.call("appliancectl", "status", "--json")
        answer: dict[str, Any] = json.loads(ended.stdout) if ended.stdout.startswith("{") else {}
        return answer

    def property(self, unit: str, name: str) -> str:
        """One property of a unit."""
        return self.systemctl("show", "--value", "--property", name, unit).strip()

    def main_pid(self, unit: str) -> int:
        """0 where it does not run."""
        return int(self.property(unit, "MainPID"))

    def engine_pid(self) -> int:
        """The leader of the engine's life; 0 where there is none, nor a spare."""
        told = self.status().get("engine_pid")
        if told:
            return int(told)
        found = self.box.call("pgrep", "-f", "^[^ ]*python[^ ]* -m appliance.engine ").stdout.split()
        return int(found[0]) if found else 0

    def wait_until_serving(self, *, above: int = 0, timeout_s: float = 90.0) -> int:
        """Until a generation higher than `above` serves; which one."""
        seen: dict[str, Any] = {}

        def serves() -> bool:
            seen.update(self.status())
            return seen.get("state") == "serving" and seen["generation"] > above

        try:
            wait_until(serves, "it serves", timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; status: {seen}\n{self.journal()}") from None
        return int(seen["generation"])

    def chat(self, question: str) -> str:
        """One answer, through curl."""
        return answer_in(self.box.do(*chat_command(question), timeout_s=190))

    def http(self, path: str) -> tuple[int, str]:
        """GET: code and body. A refused connection fails the test."""
        text = self.box.do("curl", "--silent", "--show-error", "--max-time", "60", "--write-out", "\n%{http_code}", URL + path)
        body, _, code = text.rpartition("\n")
        return int(code), body

    def journal(self, *arguments: str) -> str:
        """The units' messages of this boot."""
        return self.box.do("journalctl", "--boot", "--output=cat", "--no-pager", "-u", SUPERVISOR, "-u", GATEWAY, *arguments)

    def load(self, *, clients: int, tokens: int, seconds: float) -> Load:
        """Clients that stream answers one after the other for a while; with 0 seconds one answer each."""
        self.box.put(LOAD_PROGRAM, "/root/load.py")
        return Load(self.box.start("python3", "/root/load.py", str(clients), str(tokens), str(seconds)))


class Load:
    """Clients at work in the box."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert process.stdout is not None
        assert process.stdout.readline() == "flowing\n", "no client got a first token"

    def result(self, timeout_s: float = 240.0) -> dict[str, Any]:
        """`done` answers, `failed` reasons, `longest_gap_s`."""
        out, err = self._process.communicate(timeout=timeout_s)
        assert self._process.returncode == 0, err
        found: dict[str, Any] = json.loads(out)
        return found
