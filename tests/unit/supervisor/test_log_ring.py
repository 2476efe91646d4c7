"""The ring's bounds and what counts as a line."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from appliance.supervisor.log_ring import CUT, LogRing


def texts(*pieces: bytes, **limits: int) -> list[str]:
    """The lines that these pieces of output make."""
    ring = LogRing(**({"max_lines": 100} | limits))
    found = [line for piece in pieces for line in ring.feed(piece, 1.0)] + ring.finish(2.0)
    return [line.text for line in found]


def test_lines_are_put_together_across_reads() -> None:
    """A line may arrive in pieces, and the last one without a newline."""
    assert texts(b"CUDA out", b" of memory\nnext\nla", b"st") == ["CUDA out of memory", "next", "last"]


def test_lines_are_numbered_from_one() -> None:
    """Numbers go on counting when old lines fall out: a citation stays right."""
    ring = LogRing(2)
    ring.feed(b"a\nb\nc\n", 1.0)
    assert [(line.number, line.text) for line in ring.lines] == [(2, "b"), (3, "c")]


def test_a_huge_line_is_cut_and_said_to_be() -> None:
    """A line without an end costs bounded memory and the next line is whole again."""
    assert texts(b"x" * 50, b"y" * 50, b"z\nnext\n", line_max_bytes=20) == ["x" * 20 + CUT, "next"]
    assert texts(b"x" * 50 + b"\nnext\n", line_max_bytes=20) == ["x" * 20 + CUT, "next"]


def test_bytes_are_bounded() -> None:
    """Few but long lines do not fill the memory either."""
    ring = LogRing(1000, max_bytes=100)
    ring.feed(b"0123456789\n" * 50, 1.0)
    assert ring.size_bytes <= 100
    assert len(ring) == 10


def test_progress_bars_and_colours() -> None:
    """A bar that repaints its line is one line, its last picture; colours are no text."""
    assert texts(b" 10%\r 50%\r100%\n\x1b[31mERROR\x1b[0m x\r\n") == ["100%", "ERROR x"]


def test_output_that_is_no_utf8_is_kept() -> None:
    """Bytes that are no UTF-8 do not end the reading."""
    assert texts(b"a\xffb\n") == ["a\ufffdb"]


@given(st.lists(st.binary(max_size=200), max_size=20))
def test_any_output_stays_in_its_bounds(pieces: list[bytes]) -> None:
    """Whatever is printed, in whatever pieces: lines, bytes and line lengths are bounded and numbers rise by one."""
    ring = LogRing(5, max_bytes=200, line_max_bytes=50)
    numbers = [line.number for piece in pieces for line in ring.feed(piece, 0.0)] + [line.number for line in ring.finish(0.0)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(ring) <= 5
    assert ring.size_bytes <= 200
    assert all(len(line.text) <= 50 + len(CUT) for line in ring.lines)


def test_a_flood_of_short_lines_is_thinned() -> None:
    """A pipe full of newlines would keep the loop for ten seconds: the first, the last and the long ones stay; the rest is counted."""
    ring = LogRing(10_000)
    fatal = b"torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
    lines = ring.feed(b"begin\n" + b"\n" * 30_000 + fatal + b"\n" + b"x\n" * 10_000 + b"end\npart", 1.0)
    said = [line.text for line in lines]
    assert len(lines) < 2000
    assert (said[0], said[-1]) == ("begin", "end")
    assert fatal.decode() in said
    assert "[39002 lines of less than 32 bytes are left out here]" in said
    assert [line.text for line in ring.feed(b"ial\n", 2.0)] == ["partial"]


def test_many_lines_that_say_something_are_all_kept() -> None:
    """No flood: a dump of long lines, and short ones that come piece by piece."""
    ring = LogRing(10_000)
    assert len(ring.feed(b"a line that is no shorter than others\n" * 3000, 1.0)) == 3000
    assert sum(len(ring.feed(b"x\n" * 2000, 1.0)) for _ in range(3)) == 6000
