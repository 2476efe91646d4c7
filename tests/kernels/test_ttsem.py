"""The real kernels under ttsem: no program of a launch touches what is not its launch's, or what another one changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kernels import under_ttsem
from tests.kernels.variants import variants
from tests.wheels import unpacked

pytestmark = pytest.mark.network
ROOT = Path(__file__).parents[2]
TTSEM = "ttsem==0.1.0"
"""Pure Python, which asks for a newer Python and Triton than ours, and works with them: fetched and unpacked, not installed."""

Verdicts = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def verdicts() -> Verdicts:
    """Of all cases, by name. Skips where ttsem cannot be fetched."""
    path = os.pathsep.join((str(ROOT), str(unpacked((TTSEM,), "*"))))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": path}
    ran = subprocess.run([sys.executable, under_ttsem.__file__], capture_output=True, text=True, check=False, env=environment, timeout=280)
    assert ran.returncode == 0, ran.stderr
    found: Verdicts = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("case", "verdict", "said"),
    [
        ("retain_by_load_and_store", "race", "planted.py:13: tl.store(counts_ptr + block, count + 1)"),
        ("tell_by_load_and_store", "race", "tl.store"),
        ("release_by_swap_after_a_load", "race", "tl.atomic_cas"),
        ("write_up_to_the_end", "oob_write", "writes 1 element(s) past the end of the tensor passed as `cache_ptr`"),
        ("retain_by_add_and_undo", "ok", ""),
    ],
)
def test_it_finds_what_is_planted(verdicts: Verdicts, case: str, verdict: str, said: str) -> None:
    """At the kernel's line; not what takes several launches, which is the explorer's."""
    assert verdicts[case]["verdict"] == verdict
    assert said in verdicts[case]["said"]


@pytest.mark.parametrize("case", [case.__name__ for case in under_ttsem.OURS])
def test_ours_are_clean(verdicts: Verdicts, case: str) -> None:
    """And compute what their references do; no launch was too large to be judged."""
    found = verdicts[case]
    assert (found["verdict"], found["said"], found["unchecked"]) == ("ok", "", 0)


def test_every_kernel_was_judged(verdicts: Verdicts) -> None:
    """All that a card is given."""
    launched = {name for case in under_ttsem.OURS for name in verdicts[case.__name__]["kernels"]}
    assert launched == {variant.kernel.__name__ for variant in variants()}
