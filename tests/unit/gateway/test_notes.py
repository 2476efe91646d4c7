"""An engine's notes are taken out of a stream, wherever it is cut, and add up to what the next life is told."""

from __future__ import annotations

import itertools
import json

from hypothesis import given
from hypothesis import strategies as st

from appliance.gateway.notes import Notes
from appliance.gateway.sse import Framer

TICKET = b'{"request_id":"chatcmpl-1","created_s":1.5,"seed":7,"cached_tokens":0}'
ROLE, TEXT = b'data: {"choices":[{"delta":{"role":"assistant"}}]}', b'data: {"choices":[{"delta":{"content":"a\\n\\n:ids 9"}}]}'
STREAM = b"".join(
    (
        ROLE + b"\n\n",
        b":ticket " + TICKET + b"\n:ids 5\n" + TEXT + b"\n\n",
        b":ids 6,7\n\n",
        b": a comment of somebody else\n\n",
        b":ids 8\n:finish stop\n" + TEXT + b"\n\n",
        b":end\n" + TEXT + b"\n\n",
        b":end\n" + TEXT + b"\n\n",
        b"data: [DONE]\n\n",
    )
)
CLEAN = b"".join((ROLE, b"\n\n", TEXT, b"\n\n: a comment of somebody else\n\n", (TEXT + b"\n\n") * 3, b"data: [DONE]\n\n"))


@given(st.sets(st.integers(1, len(STREAM) - 1)))
def test_notes_are_taken_out_wherever_the_stream_is_cut(cuts: set[int]) -> None:
    """The client's bytes are those of a stream without notes; the rest is told to the next life."""
    framer, notes, passed = Framer(), Notes(), b""
    bounds = [0, *sorted(cuts), len(STREAM)]
    for begin, end in itertools.pairwise(bounds):
        whole = framer.feed(STREAM[begin:end])
        passed += notes.take(whole) if whole else b""
    assert passed == CLEAN
    assert json.loads(notes.document(sent=True)) == {
        "ticket": json.loads(TICKET),
        "ids": [5, 6, 7, 8],
        "sent": True,
        "finish": "stop",
        "ended": 2,
    }


def test_nothing_noted_is_nothing_told() -> None:
    """A first attempt, and one whose engine died before its first token."""
    notes = Notes()
    assert notes.document(sent=False) == b""
    assert notes.take(ROLE + b"\n\n") == ROLE + b"\n\n"
    assert not notes.usable


def test_a_whole_answer_is_marked() -> None:
    """Its status stands in front of its data."""
    notes = Notes()
    assert notes.take(b":ticket " + TICKET + b"\n:ids 5\n\n") == b""
    assert (notes.whole, json.loads(notes.document(sent=True))["finish"]) == (0, None)
    assert notes.take(b':whole 200\ndata: {"id":1}\n\n') == b'data: {"id":1}\n\n'
    assert notes.whole == 200
