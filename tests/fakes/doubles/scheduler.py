"""The process that would hold the card: takes requests as JSON lines, gives tokens back, and dies as real ones do."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

Json = dict[str, Any]
SNAPSHOT_EVERY = 5
"""Decode steps, as --load-snapshot-publish-interval says."""
LONG_TOKENS = 1000


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


OutOfMemoryError.__module__ = "torch"
OutOfMemoryError.__qualname__ = "OutOfMemoryError"


class AcceleratorError(RuntimeError):
    """Named as torch's."""


AcceleratorError.__module__ = "torch"

OOM = (
    "CUDA out of memory. Tried to allocate 48.00 MiB. GPU 0 has a total capacity of 23.56 GiB of which 5.19 MiB is free. Including "
    "non-PyTorch memory, this process has 23.23 GiB memory in use."
)
ILLEGAL = "CUDA error: an illegal memory access was encountered"


def say(text: str) -> None:
    """A line of the log, on stderr as the real ones."""
    print(text, file=sys.stderr, flush=True)


def die_with_parent() -> None:
    """prctl(PR_SET_PDEATHSIG, SIGKILL), as sglang/srt/utils/common.py:2955 and vllm/utils/system_utils.py do."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


class Scheduler:
    """Requests by their id; a prefill chunk or a decode step of all at a time."""

    def __init__(self, chunk: int, running: int, kv_tokens: int, snapshot: Path) -> None:
        self.chunk, self.most, self.kv_tokens, self.snapshot = chunk, running, kv_tokens, snapshot
        self.step_s = float(os.environ.get("DOUBLE_STEP_S", "0.02"))
        self.oom_above = int(os.environ.get("DOUBLE_OOM_ABOVE_CHUNK", "0"))
        self.oom_pool = int(os.environ.get("DOUBLE_OOM_ABOVE_POOL", "0"))
        self.requests: dict[str, Json] = {}
        self.steps = self.prefilled = 0
        self.rest = b""

    def turn(self) -> None:
        """Read what there is, then a step."""
        ready, _, _ = select.select([0], [], [], 0 if self.requests else 0.5)
        if ready:
            data = os.read(0, 1 << 20)
            if not data:
                os._exit(0)
            *lines, self.rest = (self.rest + data).split(b"\n")
            for line in lines:
                self.take(json.loads(line))
        running = list(self.requests.values())[: self.most]
        if not running:
            self.publish()
            return
        unread = next((one for one in running if one["left"] > 0), None)
        if unread is not None:
            self.prefill(unread)
        else:
            self.decode(running)

    def take(self, order: Json) -> None:
        """A request, an abort, or a fault."""
        if "fault" in order:
            self.fail(order["fault"])
        elif "abort" in order:
            self.requests.pop(order["abort"], None)
        else:
            self.requests[order["rid"]] = {**order, "left": order["prompt"], "made": 0}

    def prefill(self, one: Json) -> None:
        """One chunk of one prompt."""
        too_wide = self.oom_above and min(self.chunk, one["left"]) > self.oom_above
        too_much = self.oom_pool and self.kv_tokens > self.oom_pool and one["prompt"] > LONG_TOKENS
        if too_wide or too_much:
            raise OutOfMemoryError(OOM)
        time.sleep(self.step_s)
        done = min(self.chunk, one["left"])
        one["left"] -= done
        self.prefilled += done
        say(self.prefill_line(done))
        self.publish()

    def decode(self, running: list[Json]) -> None:
        """One token for each."""
        time.sleep(self.step_s)
        self.steps += 1
        for one in running:
            number = one["begin"] + one["made"]
            one["made"] += 1
            last = one["made"] >= one["most"]
            self.give({"rid": one["rid"], "text": f" t{number}", "finish": "length" if last else None})
            if last:
                del self.requests[one["rid"]]
        if self.steps % SNAPSHOT_EVERY == 0:
            self.publish()

    def give(self, token: Json) -> None:
        """To the front."""
        os.write(1, json.dumps(token).encode() + b"\n")

    def fail(self, kind: str) -> None:
        """As it was told."""
        if kind == "oom":
            raise OutOfMemoryError(OOM)
        if kind == "illegal":
            raise AcceleratorError(ILLEGAL)
        if kind in ("segv", "kill"):
            os.kill(os.getpid(), signal.SIGSEGV if kind == "segv" else signal.SIGKILL)
        while kind == "hang":
            time.sleep(60)

    def prefill_line(self, tokens: int) -> str:
        """sglang/srt/observability/metrics_reporter.py:561."""
        running = len(self.requests) - 1
        return (
            f"[{time.strftime('%F %T')}] Prefill batch, #new-seq: 1, #new-token: {tokens}, #cached-token: 0, token usage: 0.01, "
            f"#running-req: {running}, #queue-req: 0, #pending-token: 0, cuda graph: False, input throughput (token/s): 1234.56"
        )

    def publish(self) -> None:
        """The snapshot of shared memory, sglang/srt/managers/load_snapshot.py."""
        running, used = len(self.requests), sum(one["prompt"] - one["left"] + one["made"] for one in self.requests.values())
        load = {
            "timestamp": time.time(), "dp_rank": 0, "num_running_reqs": min(running, self.most),
            "num_waiting_reqs": max(0, running - self.most), "num_used_tokens": used, "max_total_num_tokens": self.kv_tokens,
            "max_running_requests": self.most, "total_prefill_uncached_tokens": self.prefilled, "steps": self.steps,
        }  # fmt: skip
        fresh = self.snapshot.with_suffix(".new")
        fresh.write_text(json.dumps(load))
        fresh.rename(self.snapshot)


def run(dialect: str, version: str, arguments: list[str]) -> None:
    """`--scheduler CHUNK RUNNING KV_TOKENS SNAPSHOT`."""
    die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the front ends it
    chunk, running, kv_tokens, snapshot = arguments
    scheduler = Scheduler(int(chunk), int(running), int(kv_tokens), Path(snapshot))
    scheduler.publish()
    scheduler.give({"ready": True})
    try:
        while True:
            scheduler.turn()
    except RuntimeError:
        {"sglang": _sglang_death, "vllm": _vllm_death}[dialect](version)


def _sglang_death(_version: str) -> None:
    """scheduler.py:4951: the traceback, SIGQUIT to the parent, and exit code 0."""
    say(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] Scheduler hit an exception: {traceback.format_exc()}")
    os.kill(os.getppid(), signal.SIGQUIT)
    os._exit(0)


def _vllm_death(_version: str) -> None:
    """vllm/v1/engine/core.py:1512: each line with the process, the level and the place."""
    stamp = time.strftime("%m-%d %H:%M:%S")
    for line in ("EngineCore encountered a fatal error.", *traceback.format_exc().splitlines()):
        say(f"(EngineCore pid={os.getpid()}) ERROR {stamp} [core.py:1134] {line}")
    os._exit(1)
