"""Whether clients can reach the gateway: who has the port, in one sentence, with the cure."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Iterator, Sequence

import pytest

from appliance.cli.checks import door
from appliance.cli.checks.door import GATEWAY_UNIT, SOCKET_UNIT, check_door
from appliance.cli.checks.machine import Ended, Level, Machine
from appliance.config import Config


def _machine(socket_unit: str, gateway: str = "ActiveState=active") -> Machine:
    """systemd's answers for the two units; empty: it does not know them."""
    said = {SOCKET_UNIT: socket_unit, GATEWAY_UNIT: gateway}

    def run(command: Sequence[str]) -> Ended:
        words = said[command[-1]]
        return Ended(0, f"LoadState={'loaded' if words else 'not-found'}\n" + words.replace(" ", "\n"))

    return Machine(run=run)


def _config(port: int) -> Config:
    config = Config()
    return dataclasses.replace(config, gateway=dataclasses.replace(config.gateway, port=port))


@pytest.fixture
def taken() -> Iterator[Sequence[int]]:
    """A port that this very process has."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        yield [holder.getsockname()[1]]


@pytest.fixture
def free() -> int:
    """A port that nobody has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("state", ["failed", "inactive"])
def test_a_port_that_somebody_else_has_under_systemd(taken: Sequence[int], state: str) -> None:
    """The port, who holds it, that clients cannot reach the box, and what to run when it is free."""
    finding = check_door(_machine(f"ActiveState={state} Result=resources"), _config(taken[0]))
    assert finding.level is Level.FAIL
    assert f"{taken[0]} is taken by " in finding.reason
    assert f"(pid {os.getpid()})" in finding.reason
    assert "clients cannot reach" in finding.reason
    assert "systemctl restart llm-appliance-gateway.socket" in finding.cure


@pytest.mark.parametrize(
    ("socket_unit", "gateway", "words"),
    [
        ("ActiveState=active", "ActiveState=failed Result=exit-code", "the gateway behind it has failed (exit-code)"),
        ("ActiveState=active", "ActiveState=activating SubState=auto-restart", "ends each time that it starts"),
    ],
)
def test_a_gateway_that_does_not_run_behind_its_socket(taken: Sequence[int], socket_unit: str, gateway: str, words: str) -> None:
    """Clients would wait for ever."""
    finding = check_door(_machine(socket_unit, gateway), _config(taken[0]))
    assert finding.level is Level.FAIL
    assert words in finding.reason


def test_a_port_that_nobody_has(free: int) -> None:
    """Another one was configured, or the socket failed; a socket that was not started yet is no trouble."""
    changed = check_door(_machine("ActiveState=active"), _config(free))
    assert (changed.level, "gateway.port was changed" in changed.reason) == (Level.FAIL, True)
    failed = check_door(_machine("ActiveState=failed Result=resources"), _config(free))
    assert (failed.level, f"nobody listens on {free}" in failed.reason) == (Level.FAIL, True)
    assert check_door(_machine("ActiveState=inactive"), _config(free)).level is Level.OK


def test_a_socket_that_listens_is_well(taken: Sequence[int]) -> None:
    """With a gateway behind it, or none yet: the first client starts it."""
    for gateway in ("ActiveState=active", "ActiveState=inactive"):
        assert check_door(_machine("ActiveState=active", gateway), _config(taken[0])).level is Level.OK


def test_without_systemd_only_a_stranger_is_worth_a_word(taken: Sequence[int], free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`appliancectl run` may have it."""
    assert check_door(_machine(""), _config(free)).level is Level.OK
    assert check_door(_machine(""), _config(taken[0])).level is Level.WARN
    monkeypatch.setattr(door, "holder_of", lambda port: "python3 -m appliance.gateway (pid 7)")
    assert check_door(_machine(""), _config(taken[0])).level is Level.OK
