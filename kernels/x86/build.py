"""Compile the C of this folder, once for each kind of processor: `python kernels/x86/build.py`. setup.py runs it.

No compiler, or another machine than x86-64: nothing is made, and the engine computes in float32. Imports nothing of ours and
nothing of torch, so that setup.py can run it.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

SOURCES = Path(__file__).parent
KINDS: Mapping[str, tuple[str, ...]] = {
    "avx512vnni": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mavx2", "-mfma"),
    "avxvnni": ("-mavxvnni", "-mavx2", "-mfma"),
    "avx2": ("-mavx2", "-mfma"),
}
"""Compiler options by kind, the fastest first."""
_OPTIONS = (
    "-std=gnu17",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fPIC",
    "-shared",
    "-pthread",
    "-Wall",
    "-Wextra",
    "-Werror",
)


def library_name(kind: str) -> str:
    """A file of this folder."""
    return f"decoder-x86_64-{kind}.so"


def command(compiler: str, kind: str, library: Path, more: Sequence[str] = ("-s",)) -> list[str]:
    """That compiles one kind. The path of the build is not to be in the result."""
    sources = [f"-ffile-prefix-map={SOURCES}=.", str(SOURCES / "decoder.c"), "-lm"]
    return [compiler, *_OPTIONS, *KINDS[kind], *more, "-o", str(library), *sources]


def build(target: Path) -> list[Path]:
    """Compile all kinds into a folder; empty where that cannot be, with the reason on stderr."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if platform.machine() != "x86_64" or compiler is None:
        why = "no C compiler" if compiler is None else f"{platform.machine()} is no x86_64"
        print(f"kernels/x86: not compiled ({why}); the engine will compute in float32", file=sys.stderr)
        return []
    target.mkdir(parents=True, exist_ok=True)
    made = []
    for kind in KINDS:
        library = target / library_name(kind)
        partial = library.with_suffix(".partial")
        ended = subprocess.run(command(compiler, kind, partial), capture_output=True, text=True, check=False)
        if ended.returncode:
            print(f"kernels/x86: {library.name} could not be compiled; such processors go without it:\n{ended.stderr}", file=sys.stderr)
            partial.unlink(missing_ok=True)
            continue
        partial.replace(library)
        made.append(library)
    return made


if __name__ == "__main__":
    print("\n".join(str(library) for library in build(SOURCES)))
