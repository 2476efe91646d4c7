"""Compile Triton kernels for cards that are not here, and say what the compiler says of them.

    python tests/kernels/compile_ahead.py [NAME/CAPABILITY ...]    as JSON: all, or these
    python tests/kernels/compile_ahead.py --write                  all, into compiled.json and the table of docs/kernels.md

A process of its own: the tests beside it have chosen the interpreter.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.kernels.compiled import CAPABILITIES, TABLE, Compiled, source_digest, write_document
from tests.kernels.variants import Variant, variants

_BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def compiled(variant: Variant, capability: int) -> Compiled:
    """Registers, bytes of spills and of shared memory, and how many swaps, matrix instructions and barriers the code has."""
    signature = variant.signature | dict.fromkeys(variant.constants, "constexpr")
    names = variant.kernel.arg_names
    aligned = {(index,): [["tt.divisibility", 16]] for index, name in enumerate(names) if signature[name].startswith("*")}
    source = ASTSource(fn=variant.kernel, signature=signature, constexprs=variant.constants, attrs=aligned)
    options = {"num_warps": variant.warps, "num_stages": variant.stages}
    program = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = program.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(program.asm["cubin"])
        file.flush()
        said = subprocess.run([_BIN / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    used = {what: int(number) for what, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}
    assert set(used) == {"REG", "STACK", "LOCAL"}, said
    return Compiled(
        name=variant.name,
        capability=capability,
        registers=used["REG"],
        spilled_bytes=used["STACK"] + used["LOCAL"],
        shared_bytes=program.metadata.shared,
        warps=variant.warps,
        swaps=len(re.findall(r"atom\.\S*cas", ptx)),
        matrix=len(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async\.sync)", ptx)),
        matrix_wanted=variant.matrix,
        barriers=len(re.findall(r"\bttg\.barrier\b", program.asm["ttir"])),
    )


def main(wanted: list[str]) -> None:
    """The command line."""
    found = [
        compiled(variant, capability)
        for variant in variants()
        for capability in CAPABILITIES
        if wanted in ([], ["--write"]) or f"{variant.name}/{capability}" in wanted
    ]
    if wanted == ["--write"]:
        rows = [asdict(one) for one in found]
        TABLE.write_text(json.dumps({"sources": source_digest(), "kernels": rows}, indent=1) + "\n", encoding="utf-8")
        write_document(found)
    else:
        print(json.dumps([asdict(one) for one in found]))


if __name__ == "__main__":
    main(sys.argv[1:])
