"""A view as lines: of any size, readable without colour, honest about what is old or unknown."""

from __future__ import annotations

import time
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.cli.gateway_address import KEY_CURE
from appliance.cli.top_feed import View
from appliance.cli.top_screen import screen
from tests.fakes.scripted_box import flight_since, incident, rungs

NOW_S = 1000.0


def slot(number: int) -> dict[str, Any]:
    """A request with a slot."""
    return {
        "request_id": f"req-{number}", "key": "alice", "path": "/v1/chat/completions", "prompt_tokens": 4000, "tokens": 120, "age_s": 3.5,
        "last_token_s": 0.02, "stream": True, "attempt": 1, "generation": 1,
    }  # fmt: skip


def busy(slots: int = 2, waiting: int = 1) -> View:
    """A box with two cards that has something to do."""
    queue = [{"request_id": f"req-w{n}", "key": "bob", "waited_s": 1.0, "estimated_wait_s": 2.0 + n} for n in range(waiting)]
    view = View(heard_s=NOW_S, problem="")
    view.take(
        "now",
        {
            "publication": {"state": "serving", "generation": 1}, "sentence": "serving on rung 1", "applianced": {"problem": ""},
            "slots": {"capacity": 8, "in_use": slots, "holding": [slot(n) for n in range(slots)]},
            "queue": {"length": waiting, "limit": 256, "waiting": queue}, "kv_tokens": {"reserved": 10, "pool": 100},
        },
    )  # fmt: skip
    view.take(
        "machine",
        {"model": "Qwen", "engine": "sglang", "restarts": 1, "rung": rungs()[1], "rungs": 3, "limits": {"kv_tokens": 109_000}},
    )
    view.take("ladder", {"why": "restarted on rung 1 because it ran out of memory"})
    view.take("incidents", {"incidents": [incident(n, time.time(), 1.9, after=1) for n in range(9)]})
    step = {"tokens_per_s": 43.5, "first_p50_s": 0.2, "first_p95_s": 0.9, "between_p50_s": 0.02, "between_p95_s": None}
    view.take("series", {"steps": [step]})
    view.take("flight", flight_since(0, 2000.0))
    return view


def plain(view: View, width: int = 80, height: int = 24) -> list[str]:
    """Without colours."""
    return [click.unstyle(line) for line in screen(view, width, height, NOW_S)]


def test_all_of_it_fits_an_ordinary_terminal() -> None:
    """80 by 24: state, sentence, rung and why, load, KV pool, both cards, requests, incidents."""
    lines = plain(busy())
    text = "\n".join(lines)
    for words in (
        *(
            "serving  Qwen",
            "serving on rung 1",
            "rung 1 of 2",
            "slots 2/8 in use, 1 of 256 waiting",
            "43.5 tokens/s",
            "first token 200 ms / 900 ms",
        ),
        *("KV pool", "01:00.0", "02:00.0", "PCIe 4 x8", "req-0", "waits 1.0 s, about 2.0 s more", "INCIDENTS (9)", "back after 1.9 s"),
    ):
        assert words in text, text
    assert len(lines) <= 24


@given(width=st.integers(20, 200), height=st.integers(1, 60), slots=st.integers(0, 30), waiting=st.integers(0, 30))
def test_no_window_is_too_small(width: int, height: int, slots: int, waiting: int) -> None:
    """Nothing is wider or longer than the window, whatever there is to show."""
    lines = plain(busy(slots, waiting), width, height)
    assert len(lines) <= height
    assert max((len(line) for line in lines), default=0) <= width


def test_what_is_held_back_or_refused_is_said_with_the_reason() -> None:
    """Under the load, two lines each, the first three; nothing where there is nothing, or where an older gateway has no such list."""
    view = busy()
    before = plain(view)
    view.now["restrictions"] = []
    assert plain(view) == before
    red = "card 0000:01:00.0 has 99.0 % of its 24.00 GiB taken, above the red line of 98.0 %: long prompts go to the engine one at a time"
    view.now["restrictions"] = [red, *(f"prompts of exactly {tokens} tokens are refused" for tokens in (513, 514, 515))]
    lines = plain(view)
    text = " ".join(" ".join(lines).split())
    assert f"- {red} - prompts of exactly 513 tokens are refused - prompts of exactly 514 tokens are refused - … and 1 more" in text
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80


def test_each_engine_of_several_has_a_line() -> None:
    """Its card, its state, its rung, its sentence; the rung of one of them would pass for that of all."""
    view = busy()
    one = {"state": "serving", "card": "0000:01:00", "generation": 3, "rung": rungs()[0], "rungs": 3, "sentence": "serving"}
    other = one | {"state": "waiting_for_gpu", "card": "0000:02:00", "rung": rungs()[1], "sentence": "waiting for the GPU"}
    view.machine["replicas"] = [one, other]
    lines = plain(view)
    assert "01:00       serving, generation 3, rung 0, as configured: serving" in lines
    assert "02:00       waiting for gpu, generation 3, rung 1 of 2: waiting for the GPU" in lines
    assert not [line for line in lines if line.startswith("rung ")]


def test_what_has_no_room_is_counted() -> None:
    """And not silently left out."""
    assert any("more" in line and line.startswith("…") for line in plain(busy(30, 5)))


def test_silence_is_said() -> None:
    """The gateway's, and applianced's."""
    view = busy()
    view.heard_s = NOW_S - 12
    view.problem = "the gateway at http://127.0.0.1:8000: Connection refused"
    view.now["applianced"] = {"problem": "nobody listens"}
    text = "\n".join(plain(view))
    assert "nothing was heard for 12 s" in text
    assert "Connection refused" in text
    assert "applianced does not answer: nobody listens" in text


@pytest.mark.parametrize("view", [View(), View(machine={"state": "parked", "sentence": "parked because of this"}, problem="no gateway")])
def test_it_needs_nothing_to_be_known(view: View) -> None:
    """Before the first word, and of applianced alone."""
    lines = plain(view)
    assert lines[0].startswith(view.machine.get("state") or "not heard yet")


@pytest.mark.parametrize("width", [40, 80, 120])
def test_what_is_wrong_is_told_to_its_end(width: int) -> None:
    """The cure stands there: it is not cut off at the edge of a window of 80 columns."""
    view = View(heard_s=NOW_S)
    view.problem = f"the gateway at http://127.0.0.1:8000: this endpoint needs an API key, and the request has none; {KEY_CURE}"
    lines = [click.unstyle(line) for line in screen(view, width, 24, NOW_S)]
    assert KEY_CURE in " ".join(" ".join(lines).split())
    assert max(map(len, lines)) <= width
