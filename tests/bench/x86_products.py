"""The compiled 8-bit products of this processor: `python tests/bench/x86_products.py [--threads N] [--kind avx512vnni|avxvnni|avx2]`.

The four products of each of SmolLM2's layers, by numbers of rows: the same layer again and again, which stays in the caches, and all 30
layers in turn, whose 113 MB come from memory each time, as in a pass. Best of some repetitions; the rows' own quantisation is counted.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import time
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path

import torch
from torch import Tensor

from appliance_kernels.x86.library import GROUP, Matrix, address, apply_bytes, kinds, library

SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
"""Rows and columns of W: queries, keys and values; out; gate and up; down."""
LAYERS = 30
ROWS = (1, 4, 8, 16, 80, 128, 512)
TIMES = 7


class Product:
    """One random matrix, packed."""

    def __init__(self, loaded: ctypes.CDLL, rows: int, columns: int) -> None:
        self._library = loaded
        self.columns = columns
        self._packed = torch.empty(rows * columns, dtype=torch.uint8)
        self._scales = torch.empty(rows * columns // GROUP, dtype=torch.int16)
        self.products = rows * columns
        self.bytes = rows * columns + 2 * self._scales.numel()
        weight = torch.randn(rows, columns)
        loaded.pack(address(weight), rows, columns, address(self._packed), address(self._scales))
        self._matrix = Matrix(address(self._packed), address(self._scales), None, rows, columns)

    def apply(self, x: Tensor, y: Tensor, workspace: Tensor) -> None:
        """x: [rows, columns]."""
        self._library.apply(address(x), x.shape[0], self._matrix, None, ctypes.c_float(0), address(y), address(workspace))


def best_s(once: Callable[[], None]) -> float:
    """Of some calls."""
    times = []
    for _ in range(TIMES):
        started_s = time.perf_counter()
        once()
        times.append(time.perf_counter() - started_s)
    return min(times)


def measure(layers: list[list[Product]], rows: int) -> str:
    """A line of the table."""
    x = {columns: torch.randn(rows, columns) for _, columns in SHAPES}
    y = torch.empty(rows, max(height for height, _ in SHAPES))
    workspace = torch.empty(max(apply_bytes(rows, columns) for _, columns in SHAPES), dtype=torch.uint8)

    def over(some: list[list[Product]]) -> Callable[[], None]:
        def once() -> None:
            for layer in some:
                for product in layer:
                    product.apply(x[product.columns], y, workspace)

        return once

    done = rows * LAYERS * sum(product.products for product in layers[0])
    read = LAYERS * sum(product.bytes for product in layers[0])
    near_s, far_s = best_s(over(list(islice(cycle(layers[:1]), LAYERS)))), best_s(over(layers))
    return (
        f"  {rows:4} rows: {near_s * 1e3:6.2f} ms, {done / near_s / 1e9:4.0f} G products a second from caches;"
        f" {far_s * 1e3:6.2f} ms, {done / far_s / 1e9:4.0f} G, {read / far_s / 1e9:4.1f} GB/s from memory"
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--kind", help="of the compiled libraries (default: the fastest that this processor can run)")
    arguments = parser.parse_args()
    possible = kinds(Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace"))
    if arguments.kind and arguments.kind not in possible:
        parser.error(f"--kind {arguments.kind}: this processor can run {', '.join(possible) or 'none of them'}")
    loaded = library(arguments.kind)
    if loaded is None:
        sys.exit("not measured: no compiled library is here (python kernels/x86/build.py makes them), or the processor can run none")
    loaded.set_threads(arguments.threads)
    layers = [[Product(loaded, *shape) for shape in SHAPES] for _ in range(LAYERS)]
    print(f"{arguments.kind or possible[0]}, {arguments.threads} threads, load {os.getloadavg()[0]:.1f}")
    for rows in ROWS:
        print(measure(layers, rows))


if __name__ == "__main__":
    main()
