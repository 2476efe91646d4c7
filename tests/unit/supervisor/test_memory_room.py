"""What an engine on the CPU may still take: by made-up files of the kernel, and of this very process."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

from appliance.core.units import GIB, MIB
from appliance.supervisor import memory_room
from appliance.supervisor.memory_room import ADDRESSES, MEMORY, cgroup_room, look_at, room_before_start


def kernel(folder: Path, *, status: str = "VmSize:\t 1024 kB\nRssAnon:\t 64 kB\nVmSwap:\t 16 kB\nThreads:\t3\n") -> Path:
    """A /proc with one process, pid 7, in the cgroup /unit/engine-1."""
    proc = folder / "proc"
    (proc / "7").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n")
    (proc / "7/status").write_text(status)
    (proc / "7/cgroup").write_text("0::/unit/engine-1\n")
    return proc


def cgroup(path: Path, limit: str, current: int, cached: int = 0) -> None:
    """One cgroup's files."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "memory.max").write_text(f"{limit}\n")
    (path / "memory.current").write_text(f"{current}\n")
    (path / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\nactive_file 0\n")


def test_held_memory_is_what_cannot_be_dropped(tmp_path: Path) -> None:
    """Anonymous and swapped pages of all processes; mapped files are not counted."""
    seen = look_at([7, 7], kernel(tmp_path), tmp_path / "none")
    assert seen.held_bytes == 2 * 80 * 1024
    assert seen.free_bytes[MEMORY] == 4 * GIB


def test_every_cgroup_above_counts_and_its_cache_is_free(tmp_path: Path) -> None:
    """A limit on the slice binds as one on the unit does; what is without a limit is left out."""
    proc, root = kernel(tmp_path), tmp_path / "cgroup"
    cgroup(root / "unit/engine-1", "max", 10 * MIB)
    cgroup(root / "unit", str(GIB), 600 * MIB, cached=100 * MIB)
    assert cgroup_room(7, proc, root) == {"memory.max of unit": 524 * MIB}
    assert room_before_start(7, proc, root) == 524 * MIB
    cgroup(root / "unit", "9223372036854771712", 0)
    assert room_before_start(7, proc, root) == 4 * GIB


def test_without_files_nothing_is_made_up(tmp_path: Path) -> None:
    """Another kernel, a process that is gone, a controller that is not delegated."""
    seen = look_at([7], tmp_path, tmp_path)
    assert (dict(seen.free_bytes), seen.held_bytes) == ({}, 0)
    assert room_before_start(7, tmp_path, tmp_path) is None


def test_a_real_process_under_a_real_limit() -> None:
    """RLIMIT_AS less what is mapped; and a taken 64 MiB are seen as held."""
    limit = 3 * GIB
    code = "import sys; sys.stdin.readline(); x = bytearray(b'x') * (64 << 20); print(flush=True); sys.stdin.readline()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )  # fmt: skip
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        before = look_at([process.pid])
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        after = look_at([process.pid])
    finally:
        process.kill()
        process.communicate()
    assert 0 < after.free_bytes[ADDRESSES] < before.free_bytes[ADDRESSES] - 60 * MIB < limit
    assert before.held_bytes is not None
    assert after.held_bytes is not None
    assert after.held_bytes - before.held_bytes > 60 * MIB
    assert MEMORY in after.free_bytes


def test_this_process_has_room() -> None:
    """On the machine that runs the tests."""
    room = room_before_start(os.getpid())
    assert room is not None
    assert room > 16 * MIB
    assert memory_room.available_bytes() is not None
