"""A short run of chaos.py: every fault at least once, under load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.cards import HAS_COMPILER

SCRIPT = Path(__file__).parent / "chaos.py"
MINUTES, SEED = 1.5, 20


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not HAS_COMPILER, reason="no gcc to build the library and the clock with")
def test_everything_breaks_and_nothing_stays_broken() -> None:
    """No wrong verdict, no stuck state, no illegal move, no answer that is not exact or honestly refused, no leak, memory flat."""
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "--minutes", str(MINUTES), "--seed", str(SEED)], capture_output=True, text=True, check=False
    )
    print(run.stdout)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-3000:]
