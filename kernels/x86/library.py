"""The compiled decoder, if it is here and the processor can run it. The structures are those of int8.h, attention.h and decoder.c."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_float, c_int32, c_size_t, c_ssize_t, c_void_p
from pathlib import Path

from torch import Tensor

from appliance_kernels.x86.build import library_name

GROUP = 32
"""Numbers that share a scale, of a row of weights or of activations: a matrix's columns are a multiple of it."""
PANEL = 16
"""A matrix's rows are padded to a multiple of it."""

_FLAGS = {
    "avx512vnni": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx2", "fma"},
    "avxvnni": {"avx_vnni", "avx2", "fma"},
    "avx2": {"avx2", "fma"},
}
"""What /proc/cpuinfo must say, the fastest first."""


class Matrix(ctypes.Structure):
    """`struct matrix`."""

    _fields_ = (("packed", c_void_p), ("scales", c_void_p), ("bias", c_void_p), ("rows", c_int32), ("columns", c_int32))


class Layer(ctypes.Structure):
    """`struct layer`."""

    _fields_ = (
        *((name, c_void_p) for name in ("input_norm", "qk_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")),
        *((name, Matrix) for name in ("qkv", "out", "gate_up", "down")),
        ("window", c_int32),
        ("turn", c_int32),
    )


class Model(ctypes.Structure):
    """`struct model`."""

    _fields_ = (
        ("layers", POINTER(Layer)),
        *((name, c_int32) for name in ("layer_count", "hidden", "intermediate", "heads", "kv_heads", "dim", "gelu")),
        ("eps", c_float),
        ("scale", c_float),
    )


class Step(ctypes.Structure):
    """`struct step`."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "positions", "write_rows", "write_blocks", "write_offsets", "segments", "tables")),
        ("turns", POINTER(c_void_p)),
        ("cache", c_void_p),
        ("side_floats", c_ssize_t),
        *((name, c_void_p) for name in ("workspace", "words", "refused")),
        *((name, c_int32) for name in ("rows", "write_count", "segment_count", "block_tokens", "most_keys", "block_count")),
    )


LAYOUT = ctypes.sizeof(Step) + 1000 * ctypes.sizeof(Model) + 1_000_000 * ctypes.sizeof(Layer)
"""What a library that was compiled of these structures says of them."""


_FUNCTIONS = ("layout", "set_threads", "pack", "workspace_bytes", "forward", "apply_bytes", "apply")


def kinds(cpuinfo: str) -> list[str]:
    """Which of the libraries a processor can run, the fastest first."""
    line = next((line for line in cpuinfo.splitlines() if line.startswith("flags")), "")
    flags = set(line.partition(":")[2].split())
    return [kind for kind, needed in _FLAGS.items() if needed <= flags]


@functools.cache
def library(kind: str | None = None) -> ctypes.CDLL | None:
    """The fastest one for this processor, or one kind of it; None: there is none, or it was compiled of other sources and is no use.
    One is loaded at most a kind, with threads of its own."""
    possible = [kind] if kind else kinds(Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace"))
    for one in possible:
        file = Path(__file__).parent / library_name(one)
        if file.is_file() and (loaded := opened(file)):
            return loaded
    return None


def opened(file: Path) -> ctypes.CDLL | None:
    """One that was compiled of decoder.c; None: of another one."""
    loaded = ctypes.CDLL(str(file))
    return _declared(loaded) if is_ours(loaded) else None


def is_ours(loaded: ctypes.CDLL) -> bool:
    """Whether its functions and structures are those above: with others it would read and write anywhere."""
    return all(hasattr(loaded, name) for name in _FUNCTIONS) and loaded.layout() == LAYOUT


def _declared(loaded: ctypes.CDLL) -> ctypes.CDLL:
    loaded.set_threads.argtypes = (c_int32,)
    loaded.set_threads.restype = c_int32
    loaded.pack.argtypes = (c_void_p, c_int32, c_int32, c_void_p, c_void_p)
    loaded.pack.restype = None
    loaded.workspace_bytes.argtypes = (POINTER(Model), c_int32, c_int32)
    loaded.workspace_bytes.restype = c_size_t
    loaded.forward.argtypes = (POINTER(Model), POINTER(Step))
    loaded.forward.restype = None
    loaded.apply_bytes.argtypes = (c_int32, c_int32)
    loaded.apply_bytes.restype = c_size_t
    loaded.apply.argtypes = (c_void_p, c_int32, POINTER(Matrix), c_void_p, c_float, c_void_p, c_void_p)
    loaded.apply.restype = None
    return loaded


def address(tensor: Tensor | None) -> int | None:
    """Of a contiguous tensor's first number; whoever passes it on keeps the tensor."""
    assert tensor is None or tensor.is_contiguous()
    return None if tensor is None else tensor.data_ptr()


def apply_bytes(rows: int, columns: int) -> int:
    """Workspace of `apply`, of any kind."""
    loaded = library()
    assert loaded is not None
    return int(loaded.apply_bytes(rows, columns))
