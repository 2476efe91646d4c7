"""The compiled decoder under sanitizers, and held to its own bits over many shapes (int8_passes.py)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from appliance_kernels.x86.build import SOURCES, command
from appliance_kernels.x86.library import kinds, library
from tests.engine.int8_passes import MODELS, judge

ROOT = Path(__file__).parents[2]
POSSIBLE = kinds(Path("/proc/cpuinfo").read_text())
COMPILER = shutil.which(os.environ.get("CC", "cc"))
SANITIZED = ("-O0", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")

pytestmark = pytest.mark.skipif(
    not POSSIBLE or COMPILER is None, reason="NOT CHECKED: no x86-64 with AVX2, or no C compiler; apt-get install gcc"
)


@pytest.mark.parametrize("seed", range(MODELS))
@torch.inference_mode()
def test_a_sequence_is_the_same_to_the_last_bit_on_every_kind_of_processor(seed: int) -> None:
    """Every head size with every group, blocks of 1 to 32 tokens, windows that begin anywhere: alone, among others, cut anyhow."""
    libraries = [library(kind) for kind in POSSIBLE]
    judge([one for one in libraries if one is not None], seed)


def compiler() -> str:
    """It is there: pytestmark."""
    assert COMPILER is not None
    return COMPILER


def runtime(name: str) -> Path:
    """Of a sanitizer; skips where the compiler has none, or this machine does not let it run."""
    file = Path(subprocess.run([compiler(), f"-print-file-name=lib{name}.so"], capture_output=True, text=True, check=True).stdout.strip())
    if not file.is_absolute():
        pytest.skip(f"NOT CHECKED: {compiler()} comes without lib{name}.so; apt-get install libgcc-12-dev, or its like")
    tried = subprocess.run(["/bin/true"], env={"LD_PRELOAD": str(file)}, capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"NOT CHECKED: lib{name}.so does not run here: {tried.stderr.strip()[-200:]}")
    return file


def under_sanitizers(file: Path, seed: int, models: int) -> subprocess.CompletedProcess[str]:
    """In a process of its own."""
    environment = os.environ | {"LD_PRELOAD": str(runtime("asan")), "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    arguments = [sys.executable, "-m", "tests.engine.int8_passes", str(file), str(seed), str(models)]
    return subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(("kind", "seed"), [(POSSIBLE[0], 0), ("avx2", MODELS // 2)] if POSSIBLE else [])
def test_no_pass_leaves_its_arrays_nor_does_what_c_does_not_define(kind: str, seed: int, tmp_path: Path) -> None:
    """Arrays have exactly the size that they may be touched in, and gaps are between the parts of the workspace."""
    runtime("asan")
    subprocess.run(command(compiler(), kind, tmp_path / "sound.so", SANITIZED), check=True)
    ended = under_sanitizers(tmp_path / "sound.so", seed, MODELS // 4)
    assert ended.stdout == f"sound: {MODELS // 4} models\n", ended.stderr[-5000:]


def test_a_step_from_one_part_of_the_workspace_into_the_next_is_seen(tmp_path: Path) -> None:
    """Planted: a part that is one number too short."""
    runtime("asan")
    planted, right = shutil.copytree(SOURCES, tmp_path / "x86") / "decoder.c", "take(&room, rows * heads * 4)"
    source = planted.read_text()
    assert right in source
    planted.write_text(source.replace(right, right.replace("* 4)", "* 4 - 4)")))
    arguments = command(compiler(), "avx2", tmp_path / "planted.so", SANITIZED)
    subprocess.run([argument.replace(str(SOURCES / "decoder.c"), str(planted)) for argument in arguments], check=True)
    ended = under_sanitizers(tmp_path / "planted.so", 0, 1)
    assert ended.returncode
    assert "ERROR: AddressSanitizer" in ended.stderr


def pool(target: Path, *more: str) -> Path:
    """x86_pool.c, compiled."""
    sources = (f"-I{SOURCES}", str(Path(__file__).with_name("x86_pool.c")))
    subprocess.run([compiler(), "-std=gnu17", "-O1", "-g", "-pthread", *more, *sources, "-o", str(target)], check=True)
    return target


def test_the_pool_has_no_races(tmp_path: Path) -> None:
    """Thousands of jobs by a changing number of threads, in the eyes of ThreadSanitizer."""
    runtime("tsan")
    file = pool(tmp_path / "pool", "-fsanitize=thread")
    ended = subprocess.run([str(file), "3000", "0"], capture_output=True, text=True, timeout=120, check=False)
    if "FATAL: ThreadSanitizer" in ended.stderr:
        pytest.skip(f"NOT CHECKED: ThreadSanitizer does not run here: {ended.stderr.strip()[-200:]}")
    assert not ended.returncode, ended.stderr[-5000:]
    assert not ended.stderr


def test_a_child_that_is_forked_in_the_midst_of_a_job_does_nothing_of_it(tmp_path: Path) -> None:
    """It has the ticket of that job in its memory, and not the caller who knew what it was for."""
    file = pool(tmp_path / "pool")
    assert not subprocess.run([str(file), "500", "20"], timeout=120, check=False).returncode
