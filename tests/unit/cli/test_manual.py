"""The manual page is what the program says of itself."""

import shutil
import subprocess
from pathlib import Path

import pytest

from appliance.cli.manual import manual
from appliance.cli.verbs import VERBS

COMMITTED = Path(__file__).parents[3] / "docs" / "man" / "appliancectl.1"


def test_the_committed_page_is_current() -> None:
    """A changed verb fails here, with the command that mends it."""
    assert COMMITTED.read_text(encoding="utf-8") == manual(), "run: make format"


def test_every_verb_is_in_it() -> None:
    """With its example."""
    for verb in VERBS:
        assert f"\n.SS {verb}" in manual()
        assert f"appliancectl {verb}" in manual()


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed: the page's markup is not checked")
def test_groff_has_no_complaints() -> None:
    """The markup is right."""
    ended = subprocess.run(["groff", "-man", "-ww", "-Tutf8", COMMITTED], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
