"""How fast a long log is read, how much memory that takes, and how soon the online verdict stands.

    python tests/bench/diagnosis.py [--gib 1.0] [--unique 0.02] [--keep FILE]

Generates an engine log (SGLang and vLLM lines, a share of them with text that never repeats), puts one crash near its end,
and reads it as `appliancectl diagnose FILE` does, on one core.
"""

from __future__ import annotations

import argparse
import itertools
import random
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from appliance.core.evidence import Evidence, Source
from appliance.diagnosis import diagnose, is_fatal_line, read_evidence

# ruff: noqa: E501 (the lines are quoted as the engines print them)

CRASH = (
    "[2026-08-16 09:41:37 TP0] Prefill batch, #new-seq: 1, #new-token: 4096, #cached-token: 0, token usage: 0.35, #running-req: 1, #queue-req: 0, ",
    "[2026-08-16 09:41:40 TP0] Scheduler hit an exception: Traceback (most recent call last):",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 48.00 MiB. GPU 0 has a total capacity of 23.56 GiB of which 5.19 MiB is free.",
    "[2026-08-16 09:41:40] SIGQUIT received. signum=3, frame=None. It usually means one child failed.",
)


def engine_lines(unique: float, seed: int = 7) -> Iterator[str]:
    """A healthy engine's log, for ever."""
    dice = random.Random(seed)
    words = [f"{dice.choice('bcdfghjklmnpqrstvwxz')}{dice.choice('aeiou')}{dice.choice('lmnrst')}{number}" for number in range(4000)]
    for second in itertools.count():
        stamp = f"2026-08-16 {second // 3600 % 24:02d}:{second // 60 % 60:02d}:{second % 60:02d}"
        roll = dice.random()
        if roll < unique:
            yield f"[{stamp}] Receive: obj=GenerateReqInput(rid='{dice.getrandbits(128):032x}', text='{' '.join(dice.choices(words, k=20))}')"
        elif roll < 0.35:
            yield (
                f"[{stamp} TP0] Decode batch, #running-req: {dice.randint(1, 40)}, #token: {dice.randint(100, 99999)}, token usage: 0.{dice.randint(10, 99)}, "
                f"cuda graph: True, gen throughput (token/s): {dice.random() * 1000:.2f}, #queue-req: 0, "
            )
        elif roll < 0.5:
            yield CRASH[0]
        elif roll < 0.8:
            yield f'[{stamp}] INFO:     127.0.0.1:{dice.randint(10000, 60000)} - "POST /v1/chat/completions HTTP/1.1" 200 OK'
        else:
            yield (
                f"(APIServer pid=4110) INFO 08-16 12:31:01 [loggers.py:259] Engine 000: Avg prompt throughput: {dice.random() * 4000:.1f} tokens/s, "
                "Avg generation throughput: 0.0 tokens/s, Running: 1 reqs, Waiting: 0 reqs, GPU KV cache usage: 24.6%, Prefix cache hit rate: 0.0%"
            )


def write_log(path: Path, size_bytes: int, unique: float) -> None:
    """The log, with its crash at 90 % of the size."""
    written, crashed = 0, False
    with path.open("w", encoding="utf-8") as out:
        for line in engine_lines(unique):
            if not crashed and written > 0.9 * size_bytes:
                crashed = True
                out.writelines(f"{row}\n" for row in CRASH)
            out.write(line + "\n")
            written += len(line) + 1
            if written >= size_bytes:
                return


def read_it(path: Path) -> None:
    """Time, rate and peak memory of reading and judging the file."""
    began, began_cpu = time.perf_counter(), time.process_time()
    evidence = read_evidence(path)
    read_s, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
    verdict = diagnose(evidence)
    megabytes = path.stat().st_size / 1e6
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"read {megabytes:.0f} MB: {megabytes / read_s:.0f} MB/s by the clock, {megabytes / cpu_s:.0f} MB/s of one core's time")
    print(f"{len(evidence)} lines kept, peak RSS {peak:.0f} MiB")
    print(
        f"verdict {verdict.cause.label} at line {verdict.root.line if verdict.root else 0}, {time.perf_counter() - began - read_s:.3f} s after"
    )


def online(ring_lines: int = 4000) -> None:
    """From the fatal line to the verdict with a full ring, and the cost of asking about every line."""
    healthy = list(itertools.islice(engine_lines(0.05), ring_lines))
    began = time.perf_counter()
    for line in healthy:
        is_fatal_line(line)
    each_us = (time.perf_counter() - began) / ring_lines * 1e6
    ring = [Evidence(Source.ENGINE_LOG, line, 1e9 + index, index) for index, line in enumerate([*healthy[: -len(CRASH)], *CRASH])]
    tries = []
    for _attempt in range(5):
        began = time.perf_counter()
        verdict = diagnose(ring)
        tries.append(time.perf_counter() - began)
    print(
        f"online: is_fatal_line {each_us:.0f} us a line; verdict {verdict.cause.label} in {min(tries) * 1e3:.0f}..{max(tries) * 1e3:.0f} ms on {ring_lines} lines"
    )


def main() -> None:
    """Run both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--unique", type=float, default=0.02, help="share of lines whose text never repeats")
    parser.add_argument("--keep", type=Path, help="use this file, generating it if it is not there")
    options = parser.parse_args()
    online()
    with tempfile.TemporaryDirectory() as folder:
        path = options.keep or Path(folder) / "engine.log"
        if not path.exists():
            write_log(path, int(options.gib * 1e9), options.unique)
        read_it(path)


if __name__ == "__main__":
    main()
