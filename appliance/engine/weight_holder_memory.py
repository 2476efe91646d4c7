"""Where a holder's block lies, and how another process comes to it: shared memory, or a card's memory over CUDA IPC."""

from __future__ import annotations

import base64
import fcntl
import mmap
import os
import pickle
import warnings
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from appliance.core.units import format_bytes

SHARED, CUDA = "shared", "cuda"
_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"


class NoMemory(Exception):
    """The block cannot be had; says why and what to do."""


class Memory(Protocol):
    """A block, and what another process needs to map it."""

    kind: str
    block: Tensor

    def fds(self) -> tuple[int, ...]:
        """Descriptors to be sent along; they stay ours."""

    def ticket(self) -> str:
        """What is sent as text."""


class SharedMemory:
    """Owns a memfd. Whoever maps it gets it read-only, and keeps it when the holder dies: the memory goes with the last of them.

    Its size is sealed: a mapping can never reach behind its end (SIGBUS).
    """

    kind = SHARED

    def __init__(self, size_bytes: int) -> None:
        """Raises NoMemory. What is there is looked at before: nothing but the OOM killer stops a memfd that grows."""
        available = _available_bytes()
        if size_bytes > available:
            raise NoMemory(f"it takes {format_bytes(size_bytes)} of memory, and {format_bytes(available)} are available")
        self._fd = os.memfd_create("llm-appliance-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, size_bytes)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self.block = torch.frombuffer(mmap.mmap(self._fd, size_bytes), dtype=torch.uint8)
        self._read_only = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)

    def fds(self) -> tuple[int, ...]:
        """One, read-only."""
        return (self._read_only,)

    def ticket(self) -> str:
        """None is needed."""
        return ""


class CudaMemory:
    """Owns one allocation of a card. Whoever maps it may write to it, and must be gone before the holder is."""

    kind = CUDA

    def __init__(self, size_bytes: int, device: str) -> None:
        """Raises NoMemory."""
        if "expandable_segments:true" in os.environ.get(_ALLOCATOR, "").replace(" ", "").lower():
            raise NoMemory(f"{_ALLOCATOR} has expandable_segments:True, whose memory has no IPC handle: leave it out for the holder")
        if not torch.cuda.is_available():
            raise NoMemory(f"--device {device} needs CUDA, and this torch finds no card")
        try:
            self.block = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise NoMemory(f"{format_bytes(size_bytes)} of {device} cannot be had: {error}") from error

    def fds(self) -> tuple[int, ...]:
        """None."""
        return ()

    def ticket(self) -> str:
        """torch's own reduction of a CUDA tensor: the IPC handle of its allocation, and the place in it."""
        return base64.b64encode(bytes(ForkingPickler.dumps(self.block))).decode()


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise NoMemory("/proc/meminfo does not say how much memory is available")


def map_block(kind: str, size_bytes: int, ticket: str, fds: list[int]) -> Tensor:
    """A holder's block in this process.

    Args:
        ticket: unpickled where it is of a card. Only from a holder's socket, whose mode lets nobody but this user answer there.

    Raises:
        ValueError: it cannot be mapped.
    """
    if kind == CUDA:
        block = pickle.loads(base64.b64decode(ticket))
        if not isinstance(block, Tensor) or block.nbytes != size_bytes:
            raise ValueError("what came over CUDA IPC is not the block")
        return block
    if kind != SHARED or len(fds) != 1 or os.fstat(fds[0]).st_size != size_bytes:
        raise ValueError(f"there is no block of {format_bytes(size_bytes)} to be mapped")
    mapped = mmap.mmap(fds[0], size_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return torch.frombuffer(mapped, dtype=torch.uint8)
