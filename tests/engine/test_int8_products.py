"""The compiled products against their definition, on every kind of processor that this one can play."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from appliance_kernels.x86 import library as library_module
from appliance_kernels.x86.build import KINDS, SOURCES, build
from appliance_kernels.x86.library import GROUP, PANEL, Matrix, address, apply_bytes, is_ours, kinds, library
from appliance_kernels.x86.reference import linear

ROOT = Path(__file__).parents[2]
POSSIBLE = kinds(Path("/proc/cpuinfo").read_text())
GENERATOR = torch.Generator().manual_seed(5)

pytestmark = pytest.mark.skipif(not POSSIBLE or shutil.which("cc") is None, reason="no x86-64 with AVX2, or no C compiler")


class Product:
    """One packed matrix of one kind."""

    def __init__(self, kind: str, weight: Tensor, bias: Tensor | None = None) -> None:
        loaded = library(kind)
        assert loaded is not None, "kernels/x86 is not compiled: make venv"
        self._library = loaded
        height, self._columns = weight.shape
        rows = -(-height // PANEL) * PANEL
        self._packed = torch.empty(rows * self._columns, dtype=torch.uint8)
        self._scales = torch.empty(rows * self._columns // GROUP, dtype=torch.int16)
        self._bias = None if bias is None else torch.cat((bias, torch.zeros(rows - height)))
        loaded.pack(address(weight), height, self._columns, address(self._packed), address(self._scales))
        self._matrix = Matrix(address(self._packed), address(self._scales), address(self._bias), rows, self._columns)
        self._height = height

    def of(self, x: Tensor, threads: int = 1, norm: Tensor | None = None) -> Tensor:
        """Over poisoned memory."""
        self._library.set_threads(threads)
        y = torch.full((x.shape[0], self._matrix.rows), float("nan"))
        room = torch.full((apply_bytes(*x.shape) + 64,), 0xA5, dtype=torch.uint8)
        self._library.apply(address(x), x.shape[0], self._matrix, address(norm), ctypes.c_float(1e-5), address(y), address(room))
        assert room[-64:].eq(0xA5).all(), "written behind the workspace"
        return y[:, : self._height]


def normal(*shape: int) -> Tensor:
    """Random."""
    return torch.randn(*shape, generator=GENERATOR)


@pytest.mark.parametrize("kind", POSSIBLE)
@pytest.mark.parametrize(("height", "columns"), [(1, 32), (16, 64), (50, 96), (331, 576), (640, 2048), (2180, 32)])
def test_a_product_is_what_the_definition_says(kind: str, height: int, columns: int) -> None:
    """Within what a sum in 32 bits may lose, whatever the number of rows, with and without a bias."""
    weight, x, bias = normal(height, columns), normal(37, columns), normal(height)
    for rows in (1, 2, 5, 6, 7, 13, 37):
        for one in (None, bias):
            expected = linear(x[:rows], weight, one)
            error = (Product(kind, weight, one).of(x[:rows].contiguous()) - expected).abs().max() / expected.abs().max()
            assert error < 1e-5, f"{rows} rows"


def test_every_kind_of_processor_gets_the_same_bits() -> None:
    """Also where all numbers are as large as they can be: the older instructions would saturate."""
    for x, weight in ((normal(9, 256), normal(48, 256)), (torch.full((3, 256), -8.0), torch.full((48, 256), 3.0))):
        weight[::2] = -weight[::2]
        results = {kind: Product(kind, weight).of(x) for kind in POSSIBLE}
        for kind, result in results.items():
            assert torch.equal(result, results[POSSIBLE[0]]), kind
        expected = linear(x, weight)
        assert (results[POSSIBLE[0]] - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("kind", POSSIBLE)
def test_a_row_does_not_depend_on_the_other_rows_nor_on_the_threads(kind: str) -> None:
    """Every bit: alone, in any number, at any place, by 1 to 3 threads, normed first or not."""
    weight, x, norm = normal(211, 320), normal(64, 320), normal(320)
    x[7] *= 1e4  # an outlier among the neighbours changes nothing
    for one in (None, norm):
        product = Product(kind, weight)
        whole = product.of(x, norm=one)
        for threads in (1, 2, 3):
            for begin, rows in ((0, 1), (7, 1), (8, 1), (5, 3), (20, 4), (1, 6), (2, 11), (0, 33), (0, 64)):
                part = product.of(x[begin : begin + rows].contiguous(), threads, one)
                assert torch.equal(part, whole[begin : begin + rows]), f"{threads} threads, {rows} rows from {begin}"


@pytest.mark.parametrize("kind", POSSIBLE)
def test_what_is_no_number_does_not_get_lost(kind: str) -> None:
    """NaN and infinity, in an activation or in a weight, come out as no numbers; rows beside them are sound."""
    for bad in (float("nan"), float("inf"), -float("inf")):
        weight, x = normal(32, 64), normal(3, 64)
        x[1, 40] = bad
        result = Product(kind, weight).of(x)
        assert not result[1].isfinite().any()
        assert result[[0, 2]].isfinite().all()
        broken = normal(32, 64)
        broken[3, 5] = bad
        result = Product(kind, broken).of(normal(3, 64))
        assert not result[:, 3].isfinite().any()
        assert result[:, [0, 1, 2, 4]].isfinite().all()


@pytest.mark.parametrize("kind", POSSIBLE)
def test_zeros_and_the_smallest_numbers_are_no_trouble(kind: str) -> None:
    """A group without a magnitude has no scale: its share is 0."""
    x = torch.zeros(2, 64)
    x[1] = 1e-40
    assert torch.equal(Product(kind, normal(16, 64)).of(x), torch.zeros(2, 16))
    assert torch.equal(Product(kind, torch.zeros(16, 64)).of(normal(2, 64)), torch.zeros(2, 16))


@pytest.mark.parametrize("kind", POSSIBLE)
def test_a_group_has_a_magnitude_from_one_limit_on(kind: str) -> None:
    """The definition's, for activations and for weights: with less, 127 / largest would come near to infinity."""
    one, less, more = torch.full((16, 32), 1.0), torch.full((16, 32), 0.9e-30), torch.full((16, 32), 1.1e-30)
    for x, weight in ((one, less), (less, one)):
        assert not Product(kind, weight).of(x).any()
    for x, weight in ((one, more), (more, one)):
        result, expected = Product(kind, weight).of(x), linear(x, weight)
        assert (result - expected).abs().max() <= 1e-5 * expected.abs().max()
        assert expected.min() > 3e-29


def test_many_short_jobs_one_after_the_other_are_all_done() -> None:
    """The pool: 1,000 products by a changing number of threads, while another thread takes the cores away."""
    product, x = Product(POSSIBLE[0], normal(400, 64)), normal(3, 64)
    expected, stop = product.of(x), threading.Event()
    busy = threading.Thread(target=lambda: [sum(range(2000)) for _ in iter(stop.is_set, True)])
    busy.start()
    try:
        for turn in range(1000):
            assert torch.equal(product.of(x, 1 + turn // 100 % 4), expected)
    finally:
        stop.set()
        busy.join()


ELEMENTWISE = """
#include "vector.h"
void power_(const float *x, float *y, int n) { for (int i = 0; i < n; i += WIDTH) store(y + i, power(load(x + i))); }
void silu_(const float *x, float *y, int n) { for (int i = 0; i < n; i += WIDTH) store(y + i, silu(load(x + i))); }
void gelu_(const float *x, float *y, int n) { for (int i = 0; i < n; i += WIDTH) store(y + i, gelu(load(x + i))); }
"""


@pytest.fixture(params=POSSIBLE)
def elementwise(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str, Tensor], Tensor]:
    """Functions of vector.h, of one kind of processor, over a multiple of 16 numbers."""
    file = tmp_path / "vector.so"
    options = ("-std=gnu17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", f"-I{SOURCES}", *KINDS[request.param], "-x", "c", "-")
    subprocess.run(["cc", *options, "-o", str(file), "-lm"], input=ELEMENTWISE, text=True, check=True)
    loaded = ctypes.CDLL(str(file))

    def compute(name: str, x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        getattr(loaded, name)(ctypes.c_void_p(address(x)), ctypes.c_void_p(address(y)), ctypes.c_int(x.numel()))
        return y

    return compute


def test_powers_are_right_to_a_unit_in_the_last_place(elementwise: Callable[[str, Tensor], Tensor]) -> None:
    """From where they are nothing to where they are infinite; exactly 1 at 0, nothing of what is no number."""
    x = torch.cat((torch.linspace(-87, 88, 2**16), torch.linspace(-1, 1, 2**14)))
    exact = x.double().exp()
    assert ((elementwise("power_", x) - exact).abs() / exact).max() < 2**-23
    inf, nan = float("inf"), float("nan")
    ends = torch.tensor([0.0, -0.0, -87.001, -88.5, -103.0, -1e30, -inf, nan] * 2)
    assert elementwise("power_", ends).tolist() == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0] * 2


@pytest.mark.parametrize("name", ["silu_", "gelu_"])
def test_gates_are_right_wherever_they_are_asked(elementwise: Callable[[str, Tensor], Tensor], name: str) -> None:
    """To a part of the number that goes in; what is no number comes out as none."""
    x = torch.cat((torch.linspace(-12, 12, 2**16), torch.linspace(-2000, 2000, 2**14), torch.tensor([1e10, -1e10, 3e38, -3e38] * 4)))
    wide = x.double()
    exact = functional.silu(wide) if name == "silu_" else functional.gelu(wide, approximate="tanh")
    assert ((elementwise(name, x) - exact).abs() / wide.abs()).max() < 3e-7
    assert elementwise(name, torch.full((16,), float("nan"))).isnan().all()


FORKS = """
import os, sys
from tests.engine.test_int8_products import POSSIBLE, Product, normal
import torch
product, x = Product(POSSIBLE[0], normal(400, 64)), normal(3, 64)
expected = product.of(x, 3)
child = os.fork()
if not child:
    os._exit(0 if torch.equal(product.of(x, 1), expected) and torch.equal(product.of(x, 2), expected) else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_begins_with_a_pool_of_its_own() -> None:
    """OpenMP would hang there. The child computes alone, then with threads that it began itself."""
    ended = subprocess.run([sys.executable, "-c", FORKS], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr


def test_without_a_compiler_nothing_is_made_and_the_reason_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A package is built all the same."""
    monkeypatch.setenv("CC", "no-such-compiler")
    assert build(tmp_path / "none") == []
    assert "no C compiler" in capsys.readouterr().err
    monkeypatch.delenv("CC")
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert build(tmp_path / "none") == []
    assert "riscv64 is no x86_64" in capsys.readouterr().err


def test_a_library_of_other_structures_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was left over from before an update would take one field for another; nor is one that says nothing of them."""
    assert library(POSSIBLE[0]) is not None
    for source in ("int layout(void) { return 12; }", "int forward(void) { return 0; }"):
        file = tmp_path / f"{len(source)}.so"
        subprocess.run(["cc", "-shared", "-x", "c", "-", "-o", str(file)], input=source, text=True, check=True)
        assert not is_ours(ctypes.CDLL(str(file)))
        monkeypatch.setattr(library_module, "library_name", lambda _kind, file=file: str(file))
        assert library_module.library.__wrapped__(POSSIBLE[0]) is None


def test_a_compiler_that_is_too_old_for_a_kind_leaves_that_kind_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others are made; nothing half-made stays."""
    old = tmp_path / "old-cc"
    old.write_text('#!/bin/sh\ncase "$*" in *avxvnni*) exit 1;; esac\nwhile [ "$1" != -o ]; do shift; done\n: >"$2"\n')
    old.chmod(0o755)
    monkeypatch.setenv("CC", str(old))
    made = build(tmp_path / "made")
    assert len(made) == len(KINDS) - 1
    assert sorted((tmp_path / "made").iterdir()) == sorted(made)
    assert "avxvnni.so could not be compiled" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("fpu sse2", []),
        ("avx2 fma", ["avx2"]),
        ("avx2 fma avx_vnni", ["avxvnni", "avx2"]),
        ("avx2 fma avx512f avx512bw avx512vl avx512dq avx512_vnni", ["avx512vnni", "avx2"]),
        ("avx2 avx512_vnni", []),
    ],
)
def test_a_processor_gets_what_it_can_run(flags: str, expected: list[str]) -> None:
    """The fastest first; nothing that it would die of."""
    assert kinds(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t: none\n") == expected
