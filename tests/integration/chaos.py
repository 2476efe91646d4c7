"""Break everything, again and again, under load: `python tests/integration/chaos.py --minutes 30 --seed 1 [--patience 3]`.

Every fault is brought about for real at a real applianced and a real gateway with clients on it; the engine is tests/fakes/engine.py,
the cards are made up, the NVML library and the wall clock obey. Afterwards: each incident has the cause that was injected, nothing is
stuck, every move was legal, each answer was exact or honestly refused, nothing has leaked, and applianced is as small as before.

Deadlines and the limits of silence are for two cores that nobody else uses. On a busy machine all of them are stretched, by --patience or,
without it, by the load per core at the beginning: what is held to is the same, it only may take longer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sqlite3
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script from anywhere

from appliance.core.states import ALLOWED_MOVES, EngineState
from tests.integration.chaos_faults import Fault, faults_for
from tests.integration.chaos_rig import Load, Rig, clean, say
from tests.integration.supervisor import harness
from tests.integration.supervisor.harness import wait_for

STABLE_S = 1.2
QUIET_S = 1.0
"""For what a harmless event might bring about all the same."""
BACK_S = 30.0
"""Nothing takes longer here; what does is stuck. Times the patience."""
MOST_PATIENCE = 8.0
KEPT_LAST = 20
FLAT_BYTES = 5 * 2**20
EARLY_SHARE = 0.35
"""Of the time, in which applianced may be restarted; its memory is compared over the rest."""
LISTED = 20
"""Incidents asked for after a fault: more than one makes. Hundreds of documents each second would be this script's load, no box's."""
SERVING = ("serving", "degraded")
TWO_STEPS = {("draining", "planning"), ("draining", "waiting_for_gpu"), ("serving", "stopped"), ("degraded", "stopped")}
"""Two legal moves in one turn of the loop."""


class Chaos:
    """One run: the rig, what was injected, and what was found wrong."""

    def __init__(self, rig: Rig, seed: int, minutes: float) -> None:
        self.rig = rig
        self.random = random.Random(seed)
        self.seconds = 60 * minutes
        self.failures: list[str] = []
        self.done: Counter[str] = Counter()
        self.back_s: dict[str, list[float]] = {}
        self.seen: dict[str, str] = {}
        self.footprints: list[tuple[float, int, int, int]] = []
        self.causes: Counter[tuple[str, str]] = Counter()
        self.back_within_s = BACK_S * rig.patience
        self._began_s = time.monotonic()

    def run(self, load: Load) -> None:
        """Each fault once, those that restart applianced first; then by chance until the time is over."""
        faults = faults_for(self.rig)
        early = [fault for fault in faults if fault.restarts]
        calm = [fault for fault in faults if not fault.restarts]
        self.settle()
        queue = self.shuffled(early) + self.shuffled(calm)
        while queue or self.elapsed_s < self.seconds:
            if not queue:
                queue = self.shuffled(faults if self.elapsed_s < EARLY_SHARE * self.seconds else calm)
            fault = queue.pop(0)
            if fault.restarts:
                self.footprints.clear()
            self.inject(fault, load)
            if self.elapsed_s > self.seconds and all(self.done[fault.name] for fault in faults):
                return

    @property
    def elapsed_s(self) -> float:
        """Since the start."""
        return time.monotonic() - self._began_s

    def shuffled(self, faults: list[Fault]) -> list[Fault]:
        """In another order."""
        return self.random.sample(faults, len(faults))

    def inject(self, fault: Fault, load: Load) -> None:
        """One fault, and everything that has to be true after it."""
        answers = load.outcomes["exact"]
        began_s = time.monotonic()
        try:
            fault.do(self.rig)
            if fault.parks:
                self.rig.applianced.wait_state("parked")
            if not (fault.causes and fault.certain):
                time.sleep(QUIET_S)
            found = self.incidents_of(fault)
            if fault.parks:
                self.rig.applianced.ask("resume")
            self.settle()
            wait_for(lambda: load.outcomes["exact"] > answers, "clients are answered again", self.back_within_s)
        except AssertionError as error:
            self.failures.append(f"{fault.name}: stuck: {error}")
            raise
        took_s = time.monotonic() - began_s
        self.done[fault.name] += 1
        self.back_s.setdefault(fault.name, []).append(took_s)
        say(f"{self.elapsed_s:7.1f} s  {fault.name:45} {', '.join(found) or 'no incident':40} {took_s:5.2f} s")

    def incidents_of(self, fault: Fault) -> list[str]:
        """The causes of the new incidents, each one held to what was injected."""

        def fresh() -> list[dict[str, Any]]:
            listed = self.ask_incidents()
            return [incident for incident in listed if incident["incident_id"] not in self.seen]

        if fault.causes and fault.certain:
            wait_for(lambda: fresh() or None, f"an incident of {fault.name}", self.back_within_s)
        self.rig.applianced.wait_state("parked" if fault.parks else "serving", *SERVING)
        found = fresh()
        for incident in found:
            cause = incident["diagnosis"]["cause"]
            self.causes[fault.name, cause] += 1
            if cause not in fault.causes:
                self.failures.append(f"{fault.name}: wrong verdict {cause}: {incident['diagnosis']['sentence']}")
        self.seen |= {incident["incident_id"]: fault.name for incident in reversed(found)}
        return [incident["diagnosis"]["cause"] for incident in found]

    def ask_incidents(self) -> list[dict[str, Any]]:
        """While applianced is restarted, nobody answers."""
        self.rig.applianced.wait_state(*(state.value for state in EngineState))
        incidents: list[dict[str, Any]] = self.rig.applianced.ask("incidents", limit=LISTED)["incidents"]
        return incidents

    def settle(self) -> None:
        """Serving for a stable time on the rung that is configured, and measured."""
        status = self.rig.applianced.wait_state(*SERVING)
        if status["rung"]["index"]:
            self.rig.applianced.ask("restart", rung=0)
            status = self.rig.applianced.wait_state("serving", above=status["generation"])
        generation = status["generation"]
        wait_for(self.is_stable, "a stable time")
        if self.rig.applianced.status()["generation"] != generation:
            self.failures.append("the engine was restarted, and nothing had happened")
        self.footprints.append((self.elapsed_s, *footprint(self.rig.applianced.process.pid)))

    def is_stable(self) -> bool:
        """It has served for long enough that its history is forgiven."""
        status = self.rig.applianced.status()
        return bool(status) and status["state"] in SERVING and status["state_for_s"] > STABLE_S


def footprint(pid: int) -> tuple[int, int, int]:
    """Resident bytes, descriptors and threads."""
    words = Path(f"/proc/{pid}/status").read_text().split()
    resident = 1024 * int(words[words.index("VmRSS:") + 1])
    return resident, len(list(Path(f"/proc/{pid}/fd").iterdir())), int(words[words.index("Threads:") + 1])


def flatness(footprints: list[tuple[float, int, int, int]]) -> tuple[list[str], str]:
    """What grew between the first and the last tenth, and the figures."""
    if len(footprints) < 2:
        return ["the run ended before applianced could be measured twice"], "applianced was not measured"
    tenth = max(1, len(footprints) // 10)
    ends = [[statistics.median(column) for column in zip(*part, strict=True)] for part in (footprints[:tenth], footprints[-tenth:])]
    (began_s, memory_0, fds_0, threads_0), (ended_s, memory_1, fds_1, threads_1) = ends
    words = (
        f"applianced over {ended_s - began_s:.0f} s and {len(footprints)} measurements: "
        f"{memory_0 / 2**20:.1f} -> {memory_1 / 2**20:.1f} MiB resident, "
        f"{fds_0:.0f} -> {fds_1:.0f} descriptors, {threads_0:.0f} -> {threads_1:.0f} threads"
    )
    grew = []
    if abs(memory_1 - memory_0) > FLAT_BYTES:
        grew.append(f"its memory is not flat: {words}")
    if fds_1 > fds_0 + 2 or threads_1 > threads_0 + 2:
        grew.append(f"it leaks: {words}")
    return grew, words


def illegal_moves(log: Path) -> list[str]:
    """From applianced's own log, every life of it."""
    found = []
    for line in log.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError, KeyError):
            entry = json.loads(line)
            before, after = EngineState(entry["before"]), EngineState(entry["state"])
            if after not in ALLOWED_MOVES[before] and (before.value, after.value) not in TWO_STEPS:
                found.append(f"an illegal move: {before.value} -> {after.value}")
            if "please report this" in entry.get("event", ""):
                found.append(f"a defect: {line[:500]}")
    return found + [f"a defect: {line[:300]}" for line in log.read_text(errors="replace").splitlines() if "please report this" in line]


def shared_memory() -> set[str]:
    """Names of what lies in /dev/shm, and the ids of System V segments."""
    segments = {line.split()[1] for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]}
    return {path.name for path in Path("/dev/shm").iterdir()} | segments


def left_behind(before: set[str]) -> set[str]:
    """What came into being since and stays; not what other programs on the machine hold, or have just made and will take away."""
    fresh = shared_memory() - before
    time.sleep(QUIET_S)
    return (fresh & shared_memory()) - of_others()


def of_others() -> set[str]:
    """What somebody who lives has mapped. Nobody of ours does when this is asked, so it is other programs' on the same machine."""
    inodes = set()  # a semaphore is mapped under the name that it had before its last one
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            inodes |= {int(line.split()[4]) for line in (process / "maps").read_text().splitlines() if "/dev/shm/" in line}
    names = set()
    for path in Path("/dev/shm").iterdir():
        with contextlib.suppress(OSError):
            names |= {path.name} if path.stat().st_ino in inodes else set()
    return names


def database_is_sound(state_dir: Path, last: list[str]) -> list[str]:
    """After every kill -9 and every full disk; and the last incidents are in it."""
    with contextlib.closing(sqlite3.connect(f"file:{state_dir}/incidents.db?mode=ro", uri=True)) as database:
        (answer,) = database.execute("PRAGMA integrity_check").fetchone()
        kept = {row[0] for row in database.execute("SELECT incident_id FROM incidents")}
    torn = list(state_dir.glob("*corrupt*"))
    lost = [f"an incident was not written: {incident}" for incident in last if incident not in kept]
    return lost if answer == "ok" and not torn else [*lost, f"incidents.db: {answer} {torn}"]


def main() -> int:
    """0 when nothing was found wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--patience", type=float, default=min(MOST_PATIENCE, max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))))
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # also when it was started in the background, where SIGINT is ignored
        signal.signal(number, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    say(f"seed {options.seed}, {options.minutes:g} minutes, patience {options.patience:.2g}, in {folder}")
    harness.DEADLINE_S *= options.patience
    shared = shared_memory()
    rig = Rig(folder, options.patience)
    for words in rig.skipped:
        say(f"SKIPPED {words}")
    chaos = Chaos(rig, options.seed, options.minutes)
    load = Load(rig, options.seed)
    try:
        with load:
            chaos.run(load)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - whatever it was, everything is given back and told
        chaos.failures.append(f"the run ended early: {error!r}")
    chaos.failures += [f"clients: {words}" for words in load.wrong]
    chaos.failures += illegal_moves(rig.applianced.log)
    code = rig.applianced.stop()
    if code != 0:
        chaos.failures.append(f"applianced ended with {code}")
    sockets = [path.name for path in rig.applianced.run_dir.glob("*.sock")]
    chaos.failures += [f"a socket is left: {name}" for name in sockets]
    chaos.failures += database_is_sound(rig.state, [*chaos.seen][-KEPT_LAST:])
    chaos.failures += rig.close()
    chaos.failures += [f"shared memory is left: {name}" for name in left_behind(shared)]
    grew, words = flatness(chaos.footprints)
    report(chaos, load, words)
    chaos.failures += grew
    for failure in chaos.failures:
        say(f"FAILED {failure}")
    if not chaos.failures:
        clean(folder)
    return 1 if chaos.failures else 0


def report(chaos: Chaos, load: Load, words: str) -> None:
    """The figures."""
    say(f"\n{'fault':45} {'times':>5} {'median s':>9} {'worst s':>8}  causes")
    for name, took_s in sorted(chaos.back_s.items()):
        causes = {cause: count for (fault, cause), count in chaos.causes.items() if fault == name}
        told = ", ".join(f"{cause} {count}" for cause, count in causes.items())
        say(f"{name:45} {len(took_s):5} {statistics.median(took_s):9.2f} {max(took_s):8.2f}  {told}")
    say(f"\n{sum(chaos.done.values())} faults, {sum(chaos.causes.values())} incidents in {chaos.elapsed_s:.0f} s")
    say(f"answers: {dict(load.outcomes)}")
    say(words)


if __name__ == "__main__":
    sys.exit(main())
