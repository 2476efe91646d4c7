"""The tests of the kernels once more, with every launch under ttsem: no program of a launch touches what is not its launch's, or what
another program changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.variants import variants
from tests.wheels import unpacked

pytestmark = pytest.mark.network
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TTSEM = "ttsem==0.1.0"
"""Pure Python, which asks for a newer Python and Triton than ours, and works with them: fetched and unpacked, not installed."""
TESTS = (
    "under_ttsem.py",
    "test_refcount.py::test_the_kernel_takes_the_steps_of_the_table",
    "test_refcount.py::test_the_same_block_several_times_in_one_launch",
    "test_kv_write.py",
    "test_row_kernels.py",
    "test_sample_kernel.py",
    "test_attention_kernels.py",
)
"""Those that need no interpreter. The first shows that planted defects are found."""


@pytest.fixture(scope="module")
def run() -> subprocess.CompletedProcess[str]:
    """All of them, in a process without the interpreter. Skips where ttsem cannot be fetched."""
    path = os.pathsep.join((str(ROOT), str(unpacked((TTSEM,), "*"))))
    command = [sys.executable, str(HERE / "under_ttsem.py"), "-q", "-p", "no:cacheprovider", *(str(HERE / test) for test in TESTS)]
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": path}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT, timeout=280)


@pytest.fixture(scope="module")
def told(run: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Its last line."""
    assert run.returncode == 0, run.stderr
    last: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return last


def test_what_is_planted_is_found_and_our_kernels_are_clean(run: subprocess.CompletedProcess[str], told: dict[str, Any]) -> None:
    """Under ttsem the tests of the kernels pass as they do in the interpreter, bfloat16 too."""
    assert told["code"] == 0, run.stdout


def test_every_launch_of_every_kernel_was_judged(told: dict[str, Any]) -> None:
    """All kernels that a card is given, and no launch was too large."""
    assert told["unchecked"] == 0
    assert {variant.kernel.__name__ for variant in variants()} <= set(told["kernels"])
