"""`appliancectl status`."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import click

from appliance.cli import asking
from appliance.cli.checks.machine import Finding, Level, Machine, warn
from appliance.cli.findings import as_row, say_finding
from appliance.cli.gateway_address import gateway_url
from appliance.cli.gateway_says import restrictions_at
from appliance.cli.place import Place
from appliance.cli.printing import ago, bad, bold, faint, fields, good, moment, say, say_json, uncertain, wrapped
from appliance.cli.verbs import Verb
from appliance.control import client
from appliance.core.errors import ApplianceError, ConfigError, ExitCode, Unreachable
from appliance.core.states import ANSWERING, COMING_BACK, EngineState
from appliance.core.units import format_duration

Json = Mapping[str, Any]
WATCH_S = 0.25


@click.command(cls=Verb)
@click.option("--watch", is_flag=True, help="Print the sentence whenever it changes, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print data for programs.")
@click.pass_obj
def status(place: Place, watch: bool, as_json: bool) -> ExitCode:
    """What is going on, in words.

    Exit code 0 while the engine serves or is on its way, 1 when it is parked or stopped or clients cannot reach it, 3 without applianced.

    \b
    Example:
      appliancectl status
      appliancectl status --watch
      appliancectl status --json | jq -r .state
    """
    if watch:
        with contextlib.suppress(KeyboardInterrupt):
            _watch(place, as_json)
        return ExitCode.OK
    answer = asking.ask(place, "status")
    state = EngineState(answer["state"])
    troubles = _troubles(place) if place.means_the_box() else []
    restrictions = _restrictions(place) if place.means_the_box() and answer.get("subscribers") else []
    if as_json:
        more = {"troubles": [as_row(trouble) for trouble in troubles], "restrictions": restrictions}
        say_json(answer | {name: found for name, found in more.items() if found})
    else:
        _print(state, answer, troubles, restrictions)
    unreached = any(trouble.level is Level.FAIL for trouble in troubles)
    return ExitCode.BAD if unreached or state in (EngineState.PARKED, EngineState.STOPPED) else ExitCode.OK


def _troubles(place: Place) -> list[Finding]:
    """What applianced cannot see of the box that it serves: a port that clients cannot reach, a configuration that has become wrong."""
    from appliance.cli.checks.door import check_door

    try:
        found = check_door(Machine(), place.load().config)
    except ConfigError as wrong:
        first = wrong.message.splitlines()[0]
        return [warn("configuration", f"has an error since it was read: {first}", "appliancectl config check; it ends the next start")]
    return [found] if found.level is not Level.OK else []


def _restrictions(place: Place) -> list[str]:
    """What the box's gateway holds back or refuses; nothing where its address is not known. One that does not run, which no subscription
    tells, is not asked: its socket would start it."""
    try:
        return restrictions_at(gateway_url(place))
    except ApplianceError:
        return []


def _watch(place: Place, as_json: bool) -> None:
    """A line a change, of the state, the sentence or the generation; that applianced is away is one too."""
    before: Json = {}
    while True:
        try:
            answer = client.ask(place.control_socket(), "status")
            seen = {name: answer.get(name) for name in ("state", "generation", "sentence")}
        except Unreachable as error:
            seen = {"state": "unreachable", "generation": None, "sentence": asking.explained(place, error).message}
        if seen != before:
            before = seen
            if as_json:
                say_json({"time_s": time.time(), **seen}, on_one_line=True)
            else:
                state = str(seen["state"])
                mark = bad(state) if state == "unreachable" else _mark(EngineState(state))
                say(f"{faint(moment(time.time()))}  {mark}  {seen['sentence']}")
            sys.stdout.flush()
        time.sleep(WATCH_S)


def _print(state: EngineState, answer: Json, troubles: Sequence[Finding], restrictions: Sequence[str]) -> None:
    model, several = answer.get("model") or "no model", answer.get("replicas") or ()
    counted = f"{len(several)} engines, a card each" if several else f"generation {answer.get('generation')}"
    say(f"{_mark(state)} {bold(str(model))} ({answer.get('engine')}, {counted})")
    for line in wrapped(str(answer.get("sentence", ""))):
        say(f"  {line}")
    say()
    for trouble in troubles:
        say_finding(trouble)
    fields(
        (
            ("engine", "" if several else _engine(answer)),
            ("up", format_duration(float(answer.get("uptime_s") or 0.0))),
            ("restarts", str(answer.get("restarts", ""))),
            *(() if several else _setting(answer)),
            ("admission", "; ".join(restrictions)),
            ("lengths of crashes", "" if restrictions else _lengths(answer.get("fused_lengths"))),
            ("last incident", _incident(answer.get("last_incident"))),
            *_sensors(answer.get("sensors")),
        )
    )
    for number, one in enumerate(several):
        say()
        say(f"{_mark(EngineState(one['state']))} {bold('card ' + one['card'])} (replica {number}, generation {one['generation']})")
        fields((("", str(one["sentence"])), ("engine", _engine(one)), ("restarts", str(one["restarts"])), *_setting(one)))


def _setting(answer: Json) -> tuple[tuple[str, str], ...]:
    return (
        ("rung", _rung(answer.get("rung"), answer.get("rungs"))),
        ("memory proof", str((answer.get("proof") or {}).get("detail", ""))),
        ("limits", _limits(answer.get("limits"))),
    )


def _engine(answer: Json) -> str:
    """Which one runs, and its process: what `kill` and `py-spy` want to be told."""
    words = f"{answer.get('engine') or ''} {answer.get('engine_version') or ''}".strip()
    return f"{words}, pid {answer['engine_pid']}" if answer.get("engine_pid") else ""


def _mark(state: EngineState) -> str:
    if state in ANSWERING:
        return good("serving") if state is EngineState.SERVING else uncertain("degraded")
    return uncertain(state.value) if state in COMING_BACK or state is EngineState.DRAINING else bad(state.value)


def place_of(rung: Json, count: int | None) -> str:
    """Where it stands on the ladder: "0, as configured", or "2 of 5", of which the last is the safest that is known."""
    if rung["index"] == 0:
        return "0, as configured"
    return f"{rung['index']} of {count - 1}" if count else str(rung["index"])


def _rung(rung: Json | None, count: int | None) -> str:
    if not rung:
        return ""
    words = (
        f"{place_of(rung, count)}: context {rung['context_length_tokens']} tokens, prefill chunk {rung['prefill_chunk_tokens']}, "
        f"{rung['max_running']} running, KV {rung['kv_dtype']}, memory fraction {rung['mem_fraction']:g}"
    )
    if rung.get("features_off"):
        words += f", without {' and '.join(word.replace('_', ' ') for word in rung['features_off'])}"
    return f"{words}; gives up: {rung['gives_up']}" if rung.get("gives_up") else words


def _limits(limits: Json | None) -> str:
    if not limits:
        return ""
    requests, context, pool = limits["max_running"], limits["context_length_tokens"], limits["kv_tokens"]
    return f"{requests} requests at once, {context} tokens each, {pool} tokens in the KV pool"


def _lengths(found: Sequence[Json] | None) -> str:
    """Those that diagnosis finds in them; the gateway's word, where there is one, has them too."""
    return "; ".join(str(one["why"]) for one in found or ())


def _incident(incident: Json | None) -> str:
    if not incident:
        return "none"
    diagnosis = incident["diagnosis"]
    return f"{incident['incident_id']}, {ago(incident['time_s'])}: {diagnosis['cause']}. {diagnosis['sentence']}"


def _sensors(sensors: Mapping[str, Json] | None) -> list[tuple[str, str]]:
    return [(name.replace("_", " "), _sensor(reading)) for name, reading in (sensors or {}).items()]


def _sensor(reading: Json) -> str:
    return str(reading["detail"]) if reading["ok"] else f"not available: {reading['detail']}"
