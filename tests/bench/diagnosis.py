"""How fast a long log is read, how much memory that takes, and how soon the online verdict stands.

    python tests/bench/diagnosis.py [--gib 1.0] [--kind ordinary|unique|prose|errors ...] [--tries 3] [--keep FOLDER]

Generates engine logs of these kinds, puts one crash near the end of each, and reads them as `appliancectl diagnose FILE` does, on
one core: ordinary (2 % of the lines hold text that never repeats), unique (30 % do, behind words that the engine logs in front of a
prompt), prose (30 % do, behind nothing that is known), errors (each line is one of a healthy engine's or of another's complaints).
"""

from __future__ import annotations

import argparse
import itertools
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[2]))

from appliance.core.evidence import Evidence, Source
from appliance.diagnosis import diagnose, is_fatal_line, load_catalogue, read_evidence
from appliance.diagnosis.pattern import Kind
from appliance.supervisor.evidence_desk import brief

# ruff: noqa: E501 (the lines are quoted as the engines print them)

CRASH = (
    "[2026-08-16 09:41:37 TP0] Prefill batch, #new-seq: 1, #new-token: 4096, #cached-token: 0, token usage: 0.35, #running-req: 1, #queue-req: 0, ",
    "[2026-08-16 09:41:40 TP0] Scheduler hit an exception: Traceback (most recent call last):",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 48.00 MiB. GPU 0 has a total capacity of 23.56 GiB of which 5.19 MiB is free.",
    "[2026-08-16 09:41:40] SIGQUIT received. signum=3, frame=None. It usually means one child failed.",
)


UNIQUE = {"ordinary": 0.02, "unique": 0.3, "prose": 0.3, "errors": 0.0}


def error_lines(seed: int = 7) -> Iterator[str]:
    """Complaints, each with a time and numbers of its own."""
    complaints = [
        sample
        for pattern in load_catalogue().patterns
        if Source.ENGINE_LOG in pattern.sources and pattern.kind in (Kind.CAUSE, Kind.CONSEQUENCE)
        for sample in pattern.samples
    ]
    dice = random.Random(seed)
    for second in itertools.count():
        stamp = f"2026-08-16 {second // 3600 % 24:02d}:{second // 60 % 60:02d}:{second % 60:02d}"
        yield f"[{stamp} TP{dice.randrange(8)}] {dice.choice(complaints)} ({dice.randrange(10**6)})"


def engine_lines(unique: float, seed: int = 7, *, before: str = "Receive: obj=GenerateReqInput") -> Iterator[str]:
    """A healthy engine's log, for ever; `before`: what stands before a text that never repeats."""
    dice = random.Random(seed)
    words = [f"{dice.choice('bcdfghjklmnpqrstvwxz')}{dice.choice('aeiou')}{dice.choice('lmnrst')}{number}" for number in range(4000)]
    for second in itertools.count():
        stamp = f"2026-08-16 {second // 3600 % 24:02d}:{second // 60 % 60:02d}:{second % 60:02d}"
        roll = dice.random()
        if roll < unique:
            yield f"[{stamp}] {before}(rid='{dice.getrandbits(128):032x}', text='{' '.join(dice.choices(words, k=20))}')"
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


def lines_of(kind: str) -> Iterator[str]:
    """A log of this kind, for ever."""
    if kind == "errors":
        return error_lines()
    return engine_lines(UNIQUE[kind], before="said " if kind == "prose" else "Receive: obj=GenerateReqInput")


def write_log(path: Path, size_bytes: int, kind: str) -> None:
    """The log, with its crash at 90 % of the size."""
    written, crashed = 0, False
    with path.open("w", encoding="utf-8") as out:
        for line in lines_of(kind):
            if not crashed and written > 0.9 * size_bytes:
                crashed = True
                out.writelines(f"{row}\n" for row in CRASH)
            out.write(line + "\n")
            written += len(line) + 1
            if written >= size_bytes:
                return


def read_it(path: Path, tries: int) -> None:
    """Medians of the rate of reading and judging the file, and the peak of memory."""
    load_catalogue()
    megabytes, by_clock, by_core, verdicts = path.stat().st_size / 1e6, [], [], []
    for _try in range(tries):
        began, began_cpu = time.perf_counter(), time.process_time()
        evidence = read_evidence(path)
        by_clock.append(megabytes / (time.perf_counter() - began))
        by_core.append(megabytes / (time.process_time() - began_cpu))
        began_cpu = time.process_time()
        verdict = diagnose(evidence)
        verdicts.append(time.process_time() - began_cpu)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{path.stem:9} {megabytes:5.0f} MB: {median(by_clock):4.0f} MB/s by the clock, {median(by_core):4.0f} MB/s of one core's time; "
        f"{len(evidence)} lines kept, verdict {verdict.cause.label} at line {verdict.root.line if verdict.root else 0} "
        f"{median(verdicts):.2f} s after; peak RSS {peak:.0f} MiB"
    )


def online(ring_lines: int = 4000) -> None:
    """From the fatal line to the verdict with a full ring, as applianced judges it, and the cost of asking about every line."""
    load_catalogue()  # as applianced does when it starts
    for name, source in (("healthy", engine_lines(0.05)), ("errors", error_lines())):
        lines = list(itertools.islice(source, ring_lines - len(CRASH)))
        began = time.process_time()
        for line in lines:
            is_fatal_line(line)
        each_us = (time.process_time() - began) / ring_lines * 1e6
        ring = [Evidence(Source.ENGINE_LOG, line, 1e9 + index, index) for index, line in enumerate([*lines, *CRASH])]
        by_clock, by_core = [], []
        for _attempt in range(9):
            began, began_cpu = time.perf_counter(), time.process_time()
            verdict = diagnose(brief(ring))
            by_core.append(time.process_time() - began_cpu)
            by_clock.append(time.perf_counter() - began)
        print(
            f"online, a ring of {ring_lines} {name} lines: is_fatal_line {each_us:.0f} us a line; verdict {verdict.cause.label} "
            f"in {median(by_clock) * 1e3:.0f} ms by the clock, {median(by_core) * 1e3:.0f} ms of one core's time"
        )


def main() -> None:
    """All of it; each log in a process of its own, so that the peaks of memory are its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--kind", choices=sorted(UNIQUE), action="append", help="of log; may be repeated (default: all)")
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="a folder for the logs, which are taken from there the next time")
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        read_it(options.read, options.tries)
        return
    online()
    with tempfile.TemporaryDirectory() as folder:
        place = options.keep or Path(folder)
        for kind in options.kind or UNIQUE:
            path = place / f"{kind}.log"
            if not path.exists():
                write_log(path, int(options.gib * 1e9), kind)
            subprocess.run([sys.executable, __file__, "--read", str(path), "--tries", str(options.tries)], check=True)


if __name__ == "__main__":
    main()
