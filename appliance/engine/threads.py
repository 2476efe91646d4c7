"""How the matrix libraries' threads behave. To be settled before torch is imported."""

from __future__ import annotations

import os


def settle_openmp() -> None:
    """Let a thread that waits for the others sleep instead of spin, unless the owner chose otherwise.

    A spinning thread takes the core from the thread it waits for as soon as anything else on the machine runs: with one busy
    process beside the engine on two cores, a small product took 0.6 to 8 ms spinning and 0.16 ms sleeping. On an idle machine
    sleeping costs 0.06 ms a product.

    torch imports numpy, whose OpenBLAS begins threads of its own that nothing here ever uses: none of those.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def thread_count(configured: int) -> int:
    """So many as configured; 0: one for each core that we may use."""
    return configured or len(os.sched_getaffinity(0))
