"""Compile every Triton kernel for cards that are not here, and print what ptxas says, as JSON: `python tests/kernels/compile_ahead.py`.

A process of its own: the tests beside it have chosen the interpreter.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from appliance_kernels.kv_write import triton as kv_write
from appliance_kernels.refcount import triton as refcount
from appliance_kernels.refcount.reference import Step

CAPABILITIES = (86, 89, 90)
_BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel with its argument types."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, int]
    warps: int


def variants() -> list[Variant]:
    """What the engine would launch."""
    words = {"words_ptr": "*i32", "blocks_ptr": "*i64", "results_ptr": "*i32", "block_count": "i32"}
    found = [Variant(f"refcount.{step.name.lower()}", refcount.take_step_kernel, words, {"STEP": int(step)}, 1) for step in Step]
    write = {
        **dict.fromkeys(("k_ptr", "v_ptr", "k_cache_ptr", "v_cache_ptr"), "*bf16"),
        **dict.fromkeys(("slots_ptr", "writers_ptr", "owners_ptr", "rows_ptr"), "*i64"),
        **dict.fromkeys(("words_ptr", "count_ptr"), "*i32"),
        **dict.fromkeys(("first_block", "end_block", "capacity", "k_stride", "v_stride"), "i32"),
    }
    for heads, dim in ((3, 64), (1, 256), (8, 128)):
        sizes = {"HEADS": heads, "DIM": dim, "BLOCK_TOKENS": 16, "WIDTH": 512}
        found.append(Variant(f"kv_write.{heads}x{dim}", kv_write.kv_write_kernel, write, sizes, 4))
    return found


def compiled(variant: Variant, capability: int) -> dict[str, object]:
    """Registers, spilled and shared bytes, and how many swaps the code has."""
    signature = variant.signature | dict.fromkeys(variant.constants, "constexpr")
    names = variant.kernel.arg_names
    aligned = {(index,): [["tt.divisibility", 16]] for index, name in enumerate(names) if signature[name].startswith("*")}
    source = ASTSource(fn=variant.kernel, signature=signature, constexprs=variant.constants, attrs=aligned)
    program = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": variant.warps})
    ptx = program.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        arch = re.search(r"\.target (sm_\w+)", ptx)
        assert arch is not None
        command = [_BIN / "ptxas", "-v", f"--gpu-name={arch[1]}", path, "-o", path.with_suffix(".cubin")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", said)))
    registers = re.search(r"Used (\d+) registers", said)
    assert registers is not None, said
    swaps = len(re.findall(r"atom\.\S*cas", ptx))
    result = Compiled(variant.name, capability, int(registers[1]), spilled, program.metadata.shared, variant.warps, swaps)
    return asdict(result)


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel on one kind of card."""

    name: str
    capability: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    warps: int
    swaps: int


if __name__ == "__main__":
    print(json.dumps([compiled(variant, capability) for variant in variants() for capability in CAPABILITIES]))
