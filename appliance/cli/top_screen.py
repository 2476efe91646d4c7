"""A view as lines of a terminal: pure, of any size, readable without colour."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from appliance.cli.printing import bad, bold, faint, good, uncertain
from appliance.cli.status import place_of
from appliance.cli.top_feed import View
from appliance.core.units import GIB

BAR = 24
OLD_S = 4.0
SENTENCE_LINES = 2
INCIDENTS = 4
RESTRICTIONS = 3
REQUESTS_MIN = 3
Json = dict[str, Any]


def screen(view: View, width: int, height: int, now_s: float) -> list[str]:
    """At most so many lines, none of them wider. `now_s` is of the monotonic clock."""
    head = [*_head(view, width), *_warnings(view, width, now_s), *_machine(view, width)]
    incidents = list(_incidents(view, width))
    room = max(REQUESTS_MIN, height - len(head) - len(incidents))
    return [*head, *_requests(view, width, room), *incidents][:height]


def _head(view: View, width: int) -> Iterator[str]:
    publication = view.now.get("publication") or {}
    state = publication.get("state") or view.machine.get("state") or "not heard yet"
    engine = f"{view.machine.get('engine') or ''} {view.machine.get('engine_version') or ''}".strip()
    facts = [view.machine.get("model"), engine, _counted("generation", publication or view.machine), _counted("restarts", view.machine)]
    words = "  ".join(str(fact) for fact in facts if fact)
    yield f"{_mark(state)}  {_cut(words, width - len(state) - 2)}"
    sentence = str(view.now.get("sentence") or view.machine.get("sentence") or "")
    for line in textwrap.wrap(sentence, max(width, 20), max_lines=SENTENCE_LINES, placeholder=" …"):
        yield bold(line)


def _warnings(view: View, width: int, now_s: float) -> Iterator[str]:
    if view.problem:
        yield from _whole(view.problem, width)
    if view.heard_s and now_s - view.heard_s > OLD_S:
        yield uncertain(_cut(f"! nothing was heard for {now_s - view.heard_s:.0f} s: what stands here is old", width))
    away = (view.now.get("applianced") or {}).get("problem")
    if away:
        yield from _whole(f"applianced does not answer: {away}", width)


def _whole(words: str, width: int) -> Iterator[str]:
    """What is wrong, to its end: the cure stands there."""
    for line in textwrap.wrap(f"! {words}", max(width, 20), subsequent_indent="  "):
        yield uncertain(line)


def _machine(view: View, width: int) -> Iterator[str]:
    several = view.machine.get("replicas") or ()
    for one in several:
        place = f"{one['card'].removeprefix('0000:'):<11} {one['state'].replace('_', ' ')}, generation {one['generation']}"
        yield _cut(f"{place}, rung {place_of(one['rung'], one.get('rungs'))}: {one['sentence']}", width)
    rung = view.machine.get("rung")
    if rung and not several:
        place = place_of(rung, view.machine.get("rungs"))
        why = f"; {view.ladder['why']}" if view.ladder.get("why") else ""
        context, chunk = f"{rung['context_length_tokens']:,}", f"{rung['prefill_chunk_tokens']:,}"
        text = f"rung {place}: context {context}, chunk {chunk}, {rung['max_running']} running"
        yield _cut(text + why, width)
    if view.now:
        yield _cut(_load(view.now), width)
        yield from _restrictions(view.now.get("restrictions") or [], width)
    if view.step:
        yield _cut(_speed(view.step), width)
    used, pool = _kv(view)
    if pool:
        yield _cut(f"KV pool     {_bar(used / pool)} {used:,} of {pool:,} tokens", width)
    for address, card in sorted(view.cards.items()):
        yield _cut(f"{address.removeprefix('0000:'):<11} {_card(card)}", width)


def _load(now: Json) -> str:
    slots, queue = now["slots"], now["queue"]
    first = queue["waiting"][0]["estimated_wait_s"] if queue["waiting"] else None
    wait = "" if first is None else f", the next of them about {_seconds(first)}"
    return f"slots {slots['in_use']}/{slots['capacity']} in use, {queue['length']} of {queue.get('limit', '?')} waiting{wait}"


def _restrictions(said: Sequence[str], width: int) -> Iterator[str]:
    """What is held back or refused, and why; a gateway of before has no such list."""
    for words in said[:RESTRICTIONS]:
        lines = textwrap.wrap(f"- {words}", max(width, 20), max_lines=SENTENCE_LINES, placeholder=" …", subsequent_indent="  ")
        yield from map(uncertain, lines)
    if len(said) > RESTRICTIONS:
        yield uncertain(_cut(f"- … and {len(said) - RESTRICTIONS} more", width))


def _speed(step: Json) -> str:
    first = f"{_seconds(step['first_p50_s'])} / {_seconds(step['first_p95_s'])}"
    between = f"{_seconds(step['between_p50_s'])} / {_seconds(step['between_p95_s'])}"
    return f"speed {step['tokens_per_s']:g} tokens/s, first token {first}, between two {between} (half / 95 %)"


def _kv(view: View) -> tuple[int, int]:
    """Used and all; what the engine counts, else what is reserved for requests."""
    pool = (view.machine.get("limits") or {}).get("kv_tokens") or 0
    if pool and view.kv_tokens_used is not None:
        return min(pool, view.kv_tokens_used), pool
    kv = view.now.get("kv_tokens") or {}
    return kv.get("reserved", 0), kv.get("pool", 0)


def _card(card: Json) -> str:
    used, total = card["used_bytes"], card["total_bytes"]
    parts = [f"{_bar(used / total if total else 0)} {used / GIB:.1f}/{total / GIB:.1f} GiB"]
    parts += [f"{card['temperature_c']} °C"] if card.get("temperature_c") is not None else []
    parts += [f"{card['power_w']:.0f} W"] if card.get("power_w") is not None else []
    parts += [f"PCIe {card['pcie_generation']} x{card['pcie_width']}"] if card.get("pcie_width") is not None else []
    return "  ".join(parts)


def _requests(view: View, width: int, room: int) -> Iterator[str]:
    if not view.now:
        return
    columns = "{:<18.18} {:<14.14} {:>7} {:>7} {:>8} {:>10} {:>4}"
    yield faint(_cut(columns.format("REQUEST", "WHOSE", "PROMPT", "TOKENS", "AGE", "LAST TOKEN", "TRY"), width))
    holding, waiting = view.now["slots"]["holding"], view.now["queue"]["waiting"]
    rows = [columns.format(*map(str, _slot(one))) for one in holding]
    rows += [
        f"{one['request_id']:<18.18} {one['key']:<14.14} waits {_seconds(one['waited_s'])}, about {_seconds(one['estimated_wait_s'])} more"
        for one in waiting
    ]
    if not rows:
        rows = ["nobody asks for anything"]
    if len(rows) > room - 1:
        rows = [*rows[: max(0, room - 2)], f"… and {len(rows) - max(0, room - 2)} more"]
    yield from (_cut(row, width) for row in rows)


def _slot(one: Json) -> Sequence[object]:
    prompt = "-" if one["prompt_tokens"] is None else one["prompt_tokens"]
    last = "none yet" if one["last_token_s"] is None else _seconds(one["last_token_s"])
    return one["request_id"], one["key"] or "-", prompt, one["tokens"], _seconds(one["age_s"]), last, one["attempt"]


def _incidents(view: View, width: int) -> Iterator[str]:
    if not view.incidents:
        return
    yield faint(_cut(f"INCIDENTS ({len(view.incidents)})", width))
    for incident in view.incidents[:INCIDENTS]:
        when = time.strftime("%m-%d %H:%M:%S", time.localtime(incident["time_s"]))
        back = "not back yet" if incident["recovered_s"] is None else f"back after {_seconds(incident['recovered_s'])}"
        yield _cut(
            f"{when}  {incident['diagnosis']['cause']} -> {incident['action']['kind']}, {back}  {incident['diagnosis']['sentence']}", width
        )


def _mark(state: str) -> str:
    colour: Callable[[str], str] = {"serving": good, "parked": bad, "stopped": bad}.get(state, uncertain)
    return colour(state.replace("_", " "))


def _counted(name: str, of: Json) -> str:
    return f"{name} {of[name]}" if name in of else ""


def _bar(share: float) -> str:
    full = round(min(1.0, max(0.0, share)) * BAR)
    return f"[{'#' * full}{'.' * (BAR - full)}]"


def _seconds(count: float | None) -> str:
    if count is None:
        return "-"
    if count < 1:
        return f"{count * 1000:.0f} ms"
    return f"{count:.1f} s" if count < 60 else f"{count // 60:.0f}m{count % 60:02.0f}s"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: max(0, width - 1)]}…"
