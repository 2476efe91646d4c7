"""Sizes and durations: what people may write, and that what we print can be read back."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.core.units import GIB, MIB, format_bytes, format_duration, parse_bytes, parse_duration_s


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("1000", 1000),
        ("24GiB", 24 * GIB),
        (" 24 gib ", 24 * GIB),
        ("24G", 24 * GIB),
        ("24GB", 24 * 1000**3),
        ("17.67 GiB", round(17.67 * GIB)),
        ("512M", 512 * MIB),
        ("9007199254740993KiB", 9007199254740993 * 1024),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, size_bytes: int) -> None:
    """iB and bare letters count in 1024s, B in 1000s, whole numbers exactly."""
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1,5GiB", "24 gigs", "1e9", "nan", "1 GiB 2", "9" * 400 + "GiB"])
def test_what_is_no_size_is_refused_by_name(text: str) -> None:
    """The refusal quotes the text and shows a legal one."""
    with pytest.raises(ValueError, match="24GiB or 512MiB") as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "duration_s"),
    [("30", 30), ("30s", 30), ("250ms", 0.25), ("1.5", 1.5), ("10min", 600), ("10m", 600), ("24h", 86400), ("7d", 604800)],
)
def test_durations_are_read_as_people_write_them(text: str, duration_s: float) -> None:
    """A bare number is seconds."""
    assert parse_duration_s(text) == pytest.approx(duration_s)


@pytest.mark.parametrize("text", ["", "s", "-5s", "5 weeks", "1h30", "inf", "9" * 400])
def test_what_is_no_duration_is_refused_by_name(text: str) -> None:
    """The refusal quotes the text and shows a legal one."""
    with pytest.raises(ValueError, match="30s, 10min or 24h") as caught:
        parse_duration_s(text)
    assert repr(text) in str(caught.value)


@given(st.integers(min_value=0, max_value=2**62))
def test_a_printed_size_reads_back_within_its_two_digits(size_bytes: int) -> None:
    """format_bytes loses at most half of its last digit."""
    unit_bytes = max(1, 1024 ** min(3, max(0, (size_bytes.bit_length() - 1) // 10)))
    assert abs(parse_bytes(format_bytes(size_bytes)) - size_bytes) <= 0.005 * unit_bytes + 1 + size_bytes * 2**-50


@given(st.text())
def test_no_text_breaks_the_parsers(text: str) -> None:
    """A value or a ValueError, nothing else."""
    for parse in (parse_bytes, parse_duration_s):
        with contextlib.suppress(ValueError):
            assert parse(text) >= 0


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [(0, "0.00 s"), (0.294, "0.29 s"), (42, "42 s"), (59.7, "1 min 0 s"), (200, "3 min 20 s"), (7500, "2 h 5 min"), (273600, "3 d 4 h")],
)
def test_durations_print_two_units_at_most(duration_s: float, text: str) -> None:
    """As the status sentence shows them."""
    assert format_duration(duration_s) == text


@given(st.floats(min_value=0, max_value=10**9))
def test_every_duration_prints(duration_s: float) -> None:
    """No gap between the units."""
    assert format_duration(duration_s)
