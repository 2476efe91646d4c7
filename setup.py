"""Everything is in setup.cfg, but for one thing: the C of kernels/x86 is compiled where there is a compiler.

What comes of it is loaded by name (kernels/x86/library.py) and knows nothing of Python, so that the wheel stays one for every
Python; on a machine where it is of no use it lies unread.
"""

from __future__ import annotations

import runpy
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


class BuildWithLibraries(build_py):
    """Compiles beside the modules: into the build, or into the checkout for an editable installation."""

    def run(self) -> None:
        super().run()
        folder = ROOT / "kernels" if self.editable_mode else Path(self.build_lib) / "appliance_kernels"
        self._made = [str(library) for library in runpy.run_path(str(ROOT / "kernels" / "x86" / "build.py"))["build"](folder / "x86")]

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """The libraries too, so that they are found to be ours."""
        return [*super().get_outputs(include_bytecode), *(self._made if not self.editable_mode else [])]

    _made: list[str] = []  # noqa: RUF012 - of the one instance that a build has


setup(cmdclass={"build_py": BuildWithLibraries})
