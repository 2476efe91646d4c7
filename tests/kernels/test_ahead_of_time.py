"""The Triton kernels on cards that are not here: they compile, fit, spill nothing, swap atomically and use the tensor cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.kernels.compiled import CAPABILITIES, Compiled, document_part, document_table, read_table, source_digest

_AGAIN = "run `make kernel-table` and look at what changed"
_COMPILED_HERE = ("refcount.retain/86", "rms_norm.40x128/89", "paged_decode.split.bf16.64x3/90")
"""One of each kind; all of them take a minute."""


def test_the_table_is_of_these_kernels() -> None:
    """Whoever changes a kernel compiles it again."""
    sources, kernels = read_table()
    assert sources == source_digest(), f"the kernels, their variants or Triton are newer than compiled.json: {_AGAIN}"
    assert {one.capability for one in kernels} == set(CAPABILITIES)
    assert document_part() == document_table(kernels), f"docs/kernels.md is older than compiled.json: {_AGAIN}"


def test_every_kernel_fits_the_cards_it_is_meant_for() -> None:
    """`triton.compile` itself refuses none of this: a kernel that is too large fails at its first launch, on the owner's card."""
    _, kernels = read_table()
    assert [complaint for one in kernels for complaint in one.complaints()] == []


def test_the_table_says_what_the_compiler_says() -> None:
    """For some of them, now and here."""
    root = Path(__file__).parents[2]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": str(root)}
    command = [sys.executable, str(Path(__file__).with_name("compile_ahead.py")), *_COMPILED_HERE]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=root)
    assert ran.returncode == 0, ran.stderr
    _, kernels = read_table()
    expected = [asdict(one) for one in kernels if f"{one.name}/{one.capability}" in _COMPILED_HERE]
    assert len(expected) == len(_COMPILED_HERE)
    assert json.loads(ran.stdout) == expected, _AGAIN


GOOD = Compiled("paged_prefill", 86, 168, 0, 24_576, 4, 0, 64, True, 0)


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (replace(GOOD, spilled_bytes=8), "spills 8 bytes"),
        (replace(GOOD, shared_bytes=102_400), "102400 bytes of shared memory of 101376"),
        (replace(GOOD, capability=90, shared_bytes=232_449), "of 232448"),
        (replace(GOOD, registers=255, warps=16), "130560 registers a block"),
        (replace(GOOD, matrix=0), "without a tensor-core instruction"),
        (replace(GOOD, name="refcount.claim"), "no atomic compare-and-swap"),
        (replace(GOOD, name="sample.bf16"), "without a barrier between"),
    ],
)
def test_what_does_not_fit_is_complained_of(bad: Compiled, complaint: str) -> None:
    """With the numbers; what fits is not."""
    assert GOOD.complaints() == []
    assert replace(GOOD, capability=90, shared_bytes=232_448).complaints() == []
    (found,) = bad.complaints()
    assert complaint in found
