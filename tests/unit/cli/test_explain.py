"""appliancectl explain."""

import json

import pytest


@pytest.mark.parametrize("name", ["--mem-fraction-static", "mem_fraction_static", "--MEM-FRACTION-STATIC=0.9"])
def test_a_flag_is_explained_however_it_is_written(ctl, name: str) -> None:
    """Dashes do not make it an option of ours."""
    said = ctl("explain", name)
    assert said.code == 0, said.err
    assert said.out.startswith("--mem-fraction-static  (flag, ")
    assert all(f"\n  {word} " in said.out for word in ("means", "default", "trades", "source"))


def test_an_unknown_name_gets_the_nearest(ctl) -> None:
    """Exit code 1."""
    said = ctl("explain", "--mem-fracton-static")
    assert (said.code, said.out) == (1, "")
    assert "nearest: --mem-fraction-static" in said.err


def test_all_are_listed_and_printed_as_data(ctl) -> None:
    """At least sixty, each with its source."""
    listed = ctl("explain").out.splitlines()
    entries = json.loads(ctl("explain", "--json").out)
    assert len(listed) == len(entries) + 1 > 60
    assert all(entry["source"] for entry in entries)
    assert json.loads(ctl("explain", "--json", "mem-fraction-static").out)["name"] == "--mem-fraction-static"
