"""Whether clients can reach the gateway of this box: systemd's socket, who has the port, and the gateway behind it."""

from __future__ import annotations

from collections.abc import Mapping

from appliance.cli.checks.machine import Finding, Machine, fail, ok, properties, warn
from appliance.config import Config
from appliance.listening import UNSEEN_HOLDER, holder_of, is_taken

SOCKET_UNIT, GATEWAY_UNIT = "llm-appliance-gateway.socket", "llm-appliance-gateway.service"
_AGAIN = f"systemctl restart {SOCKET_UNIT} {GATEWAY_UNIT}"


def check_door(machine: Machine, config: Config) -> Finding:
    """In one sentence: the port, who holds it, and the cure."""
    socket = _unit(machine, SOCKET_UNIT)
    port = config.gateway.port
    if socket.get("LoadState") != "loaded":
        return _without_systemd(port)
    if socket.get("ActiveState") == "active":
        return _behind_an_open_socket(machine, port)
    why = f"{SOCKET_UNIT} has failed" if socket.get("ActiveState") == "failed" else f"{SOCKET_UNIT} is stopped"
    if is_taken(port):
        holder = holder_of(port)
        unseen = " (as root one sees which)" if holder == UNSEEN_HOLDER else ""
        reason = f"{port} is taken by {holder}{unseen}, so {why} and clients cannot reach this box's gateway"
        return fail("port", reason, f"stop that, or set gateway.port to another and systemctl daemon-reload; then {_AGAIN}")
    if socket.get("ActiveState") == "failed":
        return fail(
            "port", f"nobody listens on {port}: {why} ({socket.get('Result') or 'no reason'})", f"journalctl -u {SOCKET_UNIT}; {_AGAIN}"
        )
    return ok("port", f"{port} is free, {why}")


def _behind_an_open_socket(machine: Machine, port: int) -> Finding:
    if not is_taken(port):
        return fail("port", f"nobody listens on {port}: gateway.port was changed", f"systemctl daemon-reload; {_AGAIN}")
    gateway = _unit(machine, GATEWAY_UNIT)
    if gateway.get("ActiveState") == "failed":
        reason = f"{port} is held by {SOCKET_UNIT}, and the gateway behind it has failed ({gateway.get('Result') or 'no reason'})"
        return fail("port", reason, f"journalctl -u {GATEWAY_UNIT} -n 20; then {_AGAIN}")
    if gateway.get("SubState") == "auto-restart":
        reason = f"{port} is held by {SOCKET_UNIT}, and the gateway behind it ends each time that it starts"
        return fail("port", reason, f"appliancectl config check; journalctl -u {GATEWAY_UNIT} -n 20")
    return ok("port", f"{port} is held by {SOCKET_UNIT}")


def _without_systemd(port: int) -> Finding:
    if not is_taken(port):
        return ok("port", f"{port} is free")
    holder = holder_of(port)
    if "appliance" in holder:
        return ok("port", f"{port} is held by {holder}")
    return warn("port", f"{port} is taken by {holder}", "stop that, or set gateway.port to another")


def _unit(machine: Machine, unit: str) -> Mapping[str, str]:
    ended = machine.ask("systemctl", "show", "--property=LoadState,ActiveState,SubState,Result", unit)
    return properties(ended.output) if ended.good else {}
