"""`python tests/fakes/doubles sglang|vllm VERSION [the engine's own command line]`: an engine of the GPU, without one.

Two processes as the real ones: a front with their HTTP, and a scheduler that computes nothing, at a pace. They print the real lines in the
real order, honour the options that the appliance sets, and fail on command (POST /fault {"kind": ...}, or at the start by DOUBLE_FAIL):
oom (an exception in a step), illegal (an illegal memory access), segv (a native death), kill (one without a word), hang (a step that
never ends), die (the front).

The answer to any prompt is " t0 t1 t2 ...": behind a message that has begun it goes on with the number after its last.

DOUBLE_STEP_S: of one decode step. DOUBLE_LOAD_S: of loading. DOUBLE_OOM_ABOVE_CHUNK: a prefill of a larger chunk runs out of memory.
DOUBLE_OOM_ABOVE_POOL: a long prompt does, where the KV cache has more tokens. DOUBLE_SMALL_BELOW: SGLang refuses a lower fraction.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys

import scheduler
import sglang
import vllm

if __name__ == "__main__":
    faulthandler.enable()
    dialect, version, arguments = sys.argv[1], sys.argv[2], sys.argv[3:]
    if "--scheduler" in arguments:
        scheduler.run(dialect, version, arguments[arguments.index("--scheduler") + 1 :])
    else:
        os.environ["DOUBLE_VERSION"] = version
        front = {"sglang": sglang.Sglang, "vllm": vllm.Vllm}[dialect](version, arguments)
        sys.exit(asyncio.run(front.serve()))
