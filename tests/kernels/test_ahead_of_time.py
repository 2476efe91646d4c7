"""The Triton kernels on cards that are not here: they compile, fit, spill nothing, and swap atomically."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

MOST_SHARED_BYTES = {86: 101_376, 89: 101_376, 90: 232_448}
MOST_REGISTERS = 65_536
"""Of a block of threads."""


def test_every_kernel_fits_the_cards_it_is_meant_for() -> None:
    """`triton.compile` itself refuses none of these: a kernel that is too large fails at its first launch, on the owner's card."""
    root = Path(__file__).parents[2]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": str(root)}
    command = [sys.executable, str(Path(__file__).with_name("compile_ahead.py"))]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=root)
    assert ran.returncode == 0, ran.stderr
    kernels = json.loads(ran.stdout)
    assert {kernel["capability"] for kernel in kernels} == set(MOST_SHARED_BYTES)
    for kernel in kernels:
        assert kernel["spilled_bytes"] == 0, kernel
        assert kernel["shared_bytes"] <= MOST_SHARED_BYTES[kernel["capability"]], kernel
        assert kernel["registers"] * 32 * kernel["warps"] <= MOST_REGISTERS, kernel
        if kernel["name"].startswith("refcount."):
            assert kernel["swaps"] >= 1, f"no atomic compare-and-swap in {kernel}"
