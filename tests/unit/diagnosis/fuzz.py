"""Whatever is given to `diagnose`: no exception, no endless regular expression, memory that does not grow.

    python tests/unit/diagnosis/fuzz.py [--minutes 10] [--seed N]

Logs are made of lines of the worked cases and of the patterns' samples, cut, repeated, mixed with bytes that are no text and wrapped
as journald, docker, Kubernetes, syslog, gzip, zstd and UTF-16 do, beside facts with values of wrong kinds. Each is read and judged,
and the verdict printed in all its forms. A failing case is written to a file, with the seed that makes it.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import random
import resource
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import zstandard

sys.path.insert(0, str(Path(__file__).parents[3]))

from appliance.core.errors import ApplianceError
from appliance.core.evidence import Evidence, Source
from appliance.diagnosis import diagnose, exit_evidence, load_catalogue, read_evidence, report
from appliance.diagnosis.bundle import write_bundle
from appliance.diagnosis.dumps import found_in
from appliance.diagnosis.nccl_trace import TraceError, read_trace
from appliance.diagnosis.recurrence import signature

CORPUS = Path(__file__).parents[2] / "corpus"
SLOW_S = 5.0
"""CPU time of one case: more is a regular expression gone wild."""
WARM_UP = 300
GROWTH_MAX_BYTES = 60 * 1024**2
ODD = (None, True, -1, 0, 137, 10**30, float("nan"), float("inf"), "", "SIGKILL", "²", "x" * 5000, [], {}, b"\xff")
NAMES = (
    "kind",
    "silent_s",
    "code",
    "signal",
    "oom_kill",
    "errno",
    "card",
    "of_engine",
    "deadline_s",
    "zone_unknown",
    "year_unknown",
    "rebooted",
)
KINDS = (
    "hang",
    "canary",
    "start",
    "spawn",
    "late",
    "launch",
    "unclosed_run",
    "lost",
    "vram_swing",
    "client_disconnect",
    "py-spy",
    "cuda",
    "nccl",
)


def material() -> list[str]:
    """Every line of every case, and every sample."""
    lines = [sample for pattern in load_catalogue().patterns for sample in pattern.samples]
    for path in CORPUS.rglob("*.json"):
        for value in json.loads(path.read_text(encoding="utf-8"))["evidence"].values():
            lines += str(value).splitlines()
    return lines


class Maker:
    """Makes cases; the same for the same seed."""

    def __init__(self, seed: int, lines: list[str]) -> None:
        self.dice = random.Random(seed)
        self.lines = lines

    def line(self) -> str:
        """One of the material, whole or damaged."""
        text = self.dice.choice(self.lines)
        damage = self.dice.randrange(12)
        if damage == 0:
            text = text[: self.dice.randrange(len(text) + 1)]
        elif damage == 1:
            text = text[self.dice.randrange(len(text) + 1) :] + self.dice.choice(self.lines)
        elif damage == 2:
            text *= self.dice.choice((2, 2, 20, 500))
        elif damage == 3:
            text = "".join(self.dice.choice(text or " ") for _ in text)
        elif damage == 4:
            place = self.dice.randrange(len(text) + 1)
            text = (
                text[:place]
                + self.dice.choice("0\0\x1b[31m\r\t\u202e{}[]()'\"%\\\ud800²½٣" + "9" * 40) * self.dice.choice((1, 3, 300))
                + text[place:]
            )
        elif damage == 5:
            text = "".join(chr(self.dice.randrange(0x3000)) for _ in range(self.dice.randrange(300)))
        return text

    def log(self) -> bytes:
        """Lines in some coat."""
        count = self.dice.choice((0, 1, 3, 3, 20, 20, 60, 400))
        text = self.dice.choice(("\n", "\n", "\r\n", "\n\n")).join(self.coat()(self.line()) for _ in range(count))
        raw = text.encode(self.dice.choice(("utf-8", "utf-8", "utf-16", "utf-16-le", "latin-1", "utf-32")), "replace")
        return self.packed(raw)

    def coat(self) -> Callable[[str], str]:
        """What a program in between puts before a line."""
        number = self.dice.randrange(10**6)
        return self.dice.choice(
            (
                lambda line: line,
                lambda line: line,
                lambda line: json.dumps(
                    {"MESSAGE": line, "__REALTIME_TIMESTAMP": str(number), "_TRANSPORT": self.dice.choice(("kernel", 5, None))}
                ),
                lambda line: json.dumps({"log": line, "time": self.dice.choice(("2026-01-01T00:00:00Z", "", 7))}),
                lambda line: f"Jun {number % 40} 09:{number % 70}:11 box {self.dice.choice(('kernel', 'systemd[1]', 'vllm[7]'))}: {line}",
                lambda line: f"[{number}.{number}] {line}",
                lambda line: f"2026-{number % 15}-{number % 33}T10:00:00.{number}Z stdout F {line}",
                lambda line: f"\x1b[36m(Worker pid={number})\x1b[0m {line}",
                lambda line: f"vllm-1  | {line}",
            )
        )

    def packed(self, raw: bytes) -> bytes:
        """Compressed, broken, or as it is."""
        how = self.dice.randrange(12)
        if how == 0:
            raw = gzip.compress(raw)
        elif how == 1:
            raw = zstandard.compress(raw)
        elif how == 2:
            raw = raw[: self.dice.randrange(len(raw) + 1)] + self.dice.randbytes(self.dice.randrange(5000))
        elif how == 3:
            raw = bytes(self.dice.randrange(20_000)) + raw
        if self.dice.randrange(20) == 0 and raw:
            place = self.dice.randrange(len(raw))
            raw = raw[:place] + self.dice.randbytes(3) + raw[place + 3 :]
        return raw

    def facts(self) -> list[Evidence]:
        """Evidence with fields of wrong kinds."""
        found = []
        for _ in range(self.dice.randrange(6)):
            data = {name: self.dice.choice(ODD) for name in self.dice.sample(NAMES, self.dice.randrange(4))}
            data["kind"] = self.dice.choice((*KINDS, *ODD[:3]))
            time_s = self.dice.choice((None, 0.0, -1e300, 1e300, float("nan"), 1.7e9))
            found.append(
                Evidence(
                    self.dice.choice(list(Source)), self.line()[:5000], time_s, self.dice.randrange(9), self.dice.choice((None, "a")), data
                )
            )
        return found


def judge(maker: Maker) -> None:
    """One case, through everything that a person can ask for."""
    evidence = maker.facts()
    for _ in range(maker.dice.choice((0, 1, 1, 2))):
        with contextlib.suppress(ApplianceError):  # compressed data that breaks off: said, and no more
            evidence += read_evidence(maker.log(), maker.dice.choice((None, *Source)))
    with contextlib.suppress(ValueError):
        evidence.append(exit_evidence(str(maker.dice.choice((*ODD, "137", "-9", "KILL", "300")))))
    verdict = diagnose(evidence, stopped_by_us=maker.dice.random() < 0.2, engine=maker.dice.choice((None, "vllm", "")))
    found = found_in(evidence)
    report.text(verdict, found=found)
    report.markdown(verdict, found)
    json.dumps(report.to_json_dict(verdict, found))
    signature(verdict, evidence)
    if maker.dice.randrange(10) == 0:
        write_bundle(io.BytesIO(), verdict, evidence, now_s=0.0)
    with contextlib.suppress(TraceError):
        read_trace(maker.dice.randbytes(maker.dice.randrange(200)))


def resident_bytes() -> int:
    """Of this process, now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> int:
    """0 when nothing went wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1, help="of the first case; each next one has the next number")
    options = parser.parse_args()
    lines = material()
    end_s = time.monotonic() + 60 * options.minutes
    warm_bytes = most_bytes = 0
    slowest, failures, count = (0.0, 0), 0, 0
    while time.monotonic() < end_s:
        seed = options.seed + count
        began_s = time.process_time()
        try:
            judge(Maker(seed, lines))
        except Exception:  # noqa: BLE001 - what this looks for
            failures += 1
            print(f"seed {seed}:\n{traceback.format_exc()}", flush=True)
        slowest = max(slowest, (time.process_time() - began_s, seed))
        count += 1
        if count == WARM_UP:
            warm_bytes = resident_bytes()
        most_bytes = max(most_bytes, resident_bytes())
    growth = resident_bytes() - warm_bytes if count > WARM_UP else 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{count} cases, {failures} exceptions; the slowest took {slowest[0]:.2f} s of CPU (seed {slowest[1]}); resident memory grew by "
        f"{growth / 2**20:.0f} MiB after the first {WARM_UP} cases, peak {peak:.0f} MiB"
    )
    return 1 if failures or slowest[0] > SLOW_S or growth > GROWTH_MAX_BYTES else 0


if __name__ == "__main__":
    sys.exit(main())
