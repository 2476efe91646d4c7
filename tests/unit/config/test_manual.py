"""docs/man/appliance.toml.5 is what the schema says."""

import shutil
import subprocess
from pathlib import Path

import pytest

from appliance.config.keys import keys_of
from appliance.config.manual import manual
from appliance.config.schema import tables

PAGES = Path(__file__).parents[3] / "docs" / "man"


def test_the_page_is_up_to_date() -> None:
    """`make format` writes it anew."""
    assert (PAGES / "appliance.toml.5").read_text(encoding="utf-8") == manual()


def test_every_key_is_in_it() -> None:
    """With its default."""
    names = [name for kind in tables().values() for name in keys_of(kind)]
    assert manual().count("Default: ") == len(names)


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed: the markup is not checked")
@pytest.mark.parametrize("page", sorted(path.name for path in PAGES.iterdir()))
def test_the_markup_is_right(page: str) -> None:
    """No warning of groff."""
    ended = subprocess.run(["groff", "-man", "-Tutf8", "-ww", str(PAGES / page)], capture_output=True, text=True, check=True)
    assert ended.stderr == ""
