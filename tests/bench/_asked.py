"""What runs in a process of its own beside ours and is asked for its times (see _engine_peers.Asked): imports nothing that is not Python's.

A line of JSON from stdin, `{"batch", "prompt_tokens", "new_tokens"}`, is answered with `{"seconds", "peak_bytes"}`: what generating them
took, and the most memory that this process has had. The end of stdin ends it. Whatever else is printed goes to stderr.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_DRAW = random.Random(1)


def peak_bytes() -> int:
    """Of this process, mapped files counted."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def fresh_prompts(batch: int, prompt_tokens: int) -> list[list[int]]:
    """Token ids."""
    return [_DRAW.choices(range(100, 9000), k=prompt_tokens) for _ in range(batch)]


def answer(load: Callable[[], Callable[[int, int, int], float]]) -> None:
    """Answer until nobody asks, or until whoever asked is gone.

    Args:
        load: what gets ready, and returns what takes batch, prompt_tokens and new_tokens and returns seconds.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    seconds = load()
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        taken_s = seconds(asked["batch"], asked["prompt_tokens"], asked["new_tokens"])
        print(json.dumps({"seconds": taken_s, "peak_bytes": peak_bytes()}), file=answers, flush=True)
