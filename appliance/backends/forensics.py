"""What an engine can be told to leave behind when it dies: switched on for a while, after a crash that nothing explains has come again.

CUDA: user-mode core dumps of the faulting kernel (CUDA_*COREDUMP*, CUDA 11 on), small ones: without the card's memory, which holds
clients' text and is as large as the card. Python: faulthandler, which prints every thread's stack at a fatal signal. torch: NCCL's
flight recorder, the last collectives of each rank, written when one times out; it had other names before torch 2.9, so both are set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

CUDA_PREFIX, NCCL_PREFIX = "cuda-", "nccl-rank-"
COLLECTIVES_KEPT = 2000
_PYTHON = {"PYTHONFAULTHANDLER": "1"}


@dataclass(frozen=True, slots=True)
class Instruments:
    """Variables of the environment, and what they cost, in words."""

    env: Mapping[str, str]
    costs: str


def instruments(engine: str, folder: str) -> Instruments:
    """For an engine of this name; what it leaves lies in the folder."""
    if engine == "native":  # it computes on the CPU, and prints its stacks as it is
        return Instruments(_PYTHON, _costs("a core file of at most 2 GiB, for as long as it takes to read its stack"))
    cuda = _cuda(folder)
    if engine == "llamacpp":
        return Instruments(cuda, _costs("seconds per faulting kernel, and a file of some 10 MiB a card"))
    env = {**_PYTHON, **cuda, **_nccl(folder)}
    if engine == "sglang":
        # Its own waiting for these dumps stays off: it would hold a dead engine for a minute (SGLANG_CUDA_COREDUMP_BEFORE_CRASH).
        env |= {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "1"}
    return Instruments(env, _costs("seconds per faulting kernel, a file of some 10 MiB a card, and about 1 % of throughput between cards"))


def _costs(what: str) -> str:
    return f"{what}; a crash takes some seconds longer, as stacks are asked for first"


def _cuda(folder: str) -> dict[str, str]:
    return {
        "CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1",
        "CUDA_ENABLE_LIGHTWEIGHT_COREDUMP": "1",
        "CUDA_COREDUMP_GENERATION_FLAGS": "skip_nonrelocated_elf_images,skip_global_memory,skip_shared_memory,skip_local_memory,skip_abort",
        "CUDA_COREDUMP_FILE": f"{folder}/{CUDA_PREFIX}%p.core",
    }


def _nccl(folder: str) -> dict[str, str]:
    sizes = dict.fromkeys(("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"), str(COLLECTIVES_KEPT))
    files = dict.fromkeys(("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE"), f"{folder}/{NCCL_PREFIX}")
    return {**sizes, **files, "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
