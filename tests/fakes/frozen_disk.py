"""A real disk that can be frozen: who writes to it sleeps in the kernel (state D), where no signal reaches. Needs root, a loop device."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SIZE_BYTES = 16 * 2**20


class FrozenDisk:
    """Owns the mount. Thawed in the end, whatever happens: a frozen disk would keep its writers until the next boot."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "disk"
        self.path.mkdir()
        image = folder / "image"
        with image.open("wb") as file:
            file.truncate(SIZE_BYTES)
        subprocess.run(["mkfs.ext4", "-q", image], check=True, capture_output=True)
        subprocess.run(["mount", "-o", "loop", image, self.path], check=True, capture_output=True)
        self._frozen = False

    def freeze(self) -> None:
        """From here on every write waits."""
        subprocess.run(["fsfreeze", "-f", self.path], check=True)
        self._frozen = True

    def thaw(self) -> None:
        """They go on; those that were killed meanwhile die."""
        if self._frozen:
            subprocess.run(["fsfreeze", "-u", self.path], check=True)
            self._frozen = False

    def close(self) -> None:
        """Give the mount back, lazily: a writer may still hold a file."""
        self.thaw()
        subprocess.run(["umount", "-l", self.path], check=False)


@contextmanager
def frozen_disk() -> Iterator[FrozenDisk | None]:
    """None where this machine cannot have one."""
    tools = all(shutil.which(tool) for tool in ("mkfs.ext4", "mount", "fsfreeze"))
    if os.geteuid() != 0 or not tools:
        yield None
        return
    folder = Path(tempfile.mkdtemp(prefix="frozen-"))
    try:
        disk = FrozenDisk(folder)
    except subprocess.CalledProcessError:
        shutil.rmtree(folder, ignore_errors=True)
        yield None
        return
    try:
        yield disk
    finally:
        disk.close()
        shutil.rmtree(folder, ignore_errors=True)
