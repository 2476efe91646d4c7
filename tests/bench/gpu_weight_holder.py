"""Held weights on a real card: `python tests/bench/gpu_weight_holder.py [--device cuda:0] [--gib 8]`. Exit code 1 is a defect,
77 that nothing was measured.

A holder with a block of that size, and engines (processes) that map it over CUDA IPC: what mapping and checksums take, whether a
process that is killed with SIGKILL leaves the block as it was to the next one, and whether one flipped bit is found. Beside it what a
load costs instead: the same bytes out of page-locked and out of pageable memory. `--device cpu` does the same in shared memory.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from appliance.engine.weight_holder_block import PAGE_BYTES, Entry, Manifest, checksum, damaged
from appliance.engine.weight_holder_memory import CudaMemory, SharedMemory, map_block
from tests.bench._card import leave_without_a_card

ENTRIES = 256
GIB = 1024**3


@dataclass(frozen=True)
class Found:
    """By one engine."""

    context_s: float
    mapped_s: float
    checked_s: float
    checked_again_s: float
    damaged: tuple[str, ...]


def engine(fd: int, device: str) -> None:
    """In a process of its own: map, check twice, report, and wait to be killed."""
    channel = socket.socket(fileno=fd)
    began_s = time.monotonic()
    if device != "cpu":
        torch.zeros(1, device=device)
        torch.cuda.synchronize()
    context_s = time.monotonic() - began_s
    data, fds, _flags, _address = socket.recv_fds(channel, 65536, 4)
    said = json.loads(data)
    manifest = Manifest.decode(os.pread(fds[0], os.fstat(fds[0]).st_size, 0))
    began_s = time.monotonic()
    block = map_block(said["kind"], manifest.block_bytes, said["ticket"], fds[1:])
    mapped_s = time.monotonic() - began_s
    times, wrong = [], ()
    for _ in range(2):
        began_s = time.monotonic()
        wrong = damaged(block, manifest)
        times.append(time.monotonic() - began_s)
    channel.send(json.dumps(asdict(Found(context_s, mapped_s, *times, wrong))).encode())
    signal.pause()


def ask_engine(memory: SharedMemory | CudaMemory, manifest: Manifest, device: str) -> Found:
    """Start one, hear what it found, kill it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, __file__, "--device", device, "--engine", str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=(theirs.fileno(),)) as process, ours, theirs:
        told = os.memfd_create("manifest")
        os.write(told, manifest.encode())
        said = json.dumps({"kind": memory.kind, "ticket": memory.ticket()}).encode()
        socket.send_fds(ours, [said], [told, *memory.fds()])
        os.close(told)
        theirs.close()
        answer = ours.recv(65536)
        process.send_signal(signal.SIGKILL)
    if not answer:
        raise SystemExit(f"the engine ended with {process.returncode} before it had found anything")
    found = json.loads(answer)
    return Found(**(found | {"damaged": tuple(found["damaged"])}))


def hold(size_bytes: int, device: str) -> tuple[SharedMemory | CudaMemory, Manifest]:
    """A block of random bytes."""
    memory = SharedMemory(size_bytes) if device == "cpu" else CudaMemory(size_bytes, device)
    piece = size_bytes // ENTRIES
    entries = []
    for index in range(ENTRIES):
        part = memory.block[index * piece : (index + 1) * piece]
        part.copy_(torch.randint(0, 256, (piece,), dtype=torch.uint8, device=part.device))
        entries.append(Entry(str(index), "uint8", (piece,), index * piece, checksum(part)))
    return memory, Manifest("random", size_bytes, tuple(entries))


def copies(size_bytes: int, device: str) -> list[str]:
    """What the same bytes cost out of the host's memory."""
    to = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    host = torch.ones(size_bytes, dtype=torch.uint8)
    lines = [f"copied from pageable memory:       {_copy_s(to, host):8.3f} s"]
    if device != "cpu":
        began_s = time.monotonic()
        error = torch.cuda.cudart().cudaHostRegister(host.data_ptr(), size_bytes, 0)
        locked_s = time.monotonic() - began_s
        if int(error) != 0:
            return [*lines, f"page-locking failed with {error}"]
        lines.append(f"page-locking it, each process anew: {locked_s:7.3f} s")
        lines.append(f"copied from page-locked memory:    {_copy_s(to, host):8.3f} s")
        torch.cuda.cudart().cudaHostUnregister(host.data_ptr())
    return lines


def _copy_s(to: torch.Tensor, host: torch.Tensor) -> float:
    began_s = time.monotonic()
    to.copy_(host, non_blocking=True)
    if to.is_cuda:
        torch.cuda.synchronize()
    return time.monotonic() - began_s


def main() -> int:
    """The table, and what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--gib", type=float, default=8.0)
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine is not None:
        engine(options.engine, options.device)
    if options.device != "cpu":
        leave_without_a_card(triton=False)
    unit = PAGE_BYTES * ENTRIES
    size_bytes = int(options.gib * GIB) // unit * unit
    memory, manifest = hold(size_bytes, options.device)
    found = [ask_engine(memory, manifest, options.device) for _ in range(3)]
    print(f"{size_bytes / GIB:.2f} GiB on {options.device}, {ENTRIES} entries; three engines, each killed with SIGKILL")
    for name in ("context_s", "mapped_s", "checked_s", "checked_again_s"):
        print(f"{name:20}" + "".join(f"{getattr(one, name):10.3f} s" for one in found))
    for line in copies(size_bytes, options.device):
        print(line)
    wrong = [f"engine {number}: {one.damaged} are damaged" for number, one in enumerate(found) if one.damaged]
    memory.block[size_bytes // 2 + 77] ^= 16
    if options.device != "cpu":
        torch.cuda.synchronize()  # another process looks at it
    seen = ask_engine(memory, manifest, options.device).damaged
    if seen != (str(ENTRIES // 2),):
        wrong.append(f"one bit of entry {ENTRIES // 2} was flipped, and {seen or 'none'} was found damaged")
    print("\n".join(wrong) or "killed engines left the block whole, and one flipped bit was found")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
