"""Every fault that chaos.py knows: how it is brought about, and what has to come of it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.integration.chaos_rig import Rig
from tests.integration.supervisor.harness import is_alive, wait_for

ILLEGAL_ACCESS = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
OUT_OF_MEMORY = (
    "[2026-08-16 09:41:37 TP0] Prefill batch, #new-seq: 1, #new-token: 4096, #cached-token: 0, token usage: 0.35, #running-req: 1, ",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 48.00 MiB. GPU 0 has a total capacity of 23.56 GiB of which 5.19 MiB is "
    "free.",
)
XID_79 = "NVRM: Xid (PCI:0000:0{card}:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
APPLICATION_XID = "NVRM: Xid (PCI:0000:01:00): 43, pid=2107, name=Xorg, Ch 00000008"
DAY_S = 86400
ENGINE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One way in which things go wrong.

    Attributes:
        causes: what each incident that it makes may be called; empty: it makes none, and nobody is disturbed.
        certain: there is at least one; else the one that was being written may be lost.
        parks: a person is needed afterwards.
        restarts: applianced, so that its memory cannot be compared across it.
    """

    name: str
    do: Callable[[Rig], None]
    causes: frozenset[str] = frozenset()
    certain: bool = True
    parks: bool = False
    restarts: bool = False


def engine_pid(rig: Rig) -> int:
    """Of the life that serves."""
    return int(rig.applianced.status()["engine_pid"])


def by_signal(number: signal.Signals) -> Callable[[Rig], None]:
    """Somebody sends it to the engine."""
    return lambda rig: os.kill(engine_pid(rig), number)


def by_itself(**fault: object) -> Callable[[Rig], None]:
    """The engine does it."""
    return lambda rig: rig.applianced.fault(**fault)


def says(*texts: str, then: dict[str, object] | None = None) -> Callable[[Rig], None]:
    """It says so, and then does nothing, or that."""
    steps: list[dict[str, object]] = [{"kind": "log", "text": text} for text in texts]
    return by_itself(kind="script", steps=[*steps, *([then] if then else [])])


def while_loading(rig: Rig) -> None:
    """kill -9 twice: the engine that serves, and the next one before it does."""
    before = rig.applianced.status()["generation"]
    os.kill(engine_pid(rig), signal.SIGKILL)

    def loading() -> int:
        status = rig.applianced.status()
        return int(status.get("engine_pid") or 0) if status and status["generation"] > before else 0

    os.kill(int(wait_for(loading, "the next life")), signal.SIGKILL)


def out_of_host_memory(rig: Rig) -> None:
    """The kernel's own OOM killer, in a memory cgroup. Its line is handed on before applianced may look, as it is in the real ring."""
    assert rig.memory_cgroup is not None
    pid = engine_pid(rig)
    (rig.memory_cgroup / "cgroup.procs").write_text(str(pid))
    kernel = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    os.lseek(kernel, 0, os.SEEK_END)
    _eat_unseen(rig)
    rig.applianced.process.send_signal(signal.SIGSTOP)
    try:
        wait_for(lambda: not is_alive(pid), "the kernel kills it")
        texts = []
        deadline_s = time.monotonic() + 5
        while not any(f"Killed process {pid} " in text for text in texts):
            assert time.monotonic() < deadline_s, f"the kernel says nothing of {pid}: {texts[-3:]}"
            try:
                texts.append(os.read(kernel, 8192).decode(errors="replace").partition(";")[2].splitlines()[0])
            except BlockingIOError:
                time.sleep(0.01)
        rig.kernel_says(*(text for text in texts if f"Killed process {pid} " in text))
    finally:
        os.close(kernel)
        rig.applianced.process.send_signal(signal.SIGCONT)


def out_of_address_space(rig: Rig) -> None:
    """RLIMIT_AS: the allocation fails, and the engine says so and leaves."""
    rig.limit_address_space(engine_pid(rig))
    rig.applianced.fault(kind="eat")


def _eat_unseen(rig: Rig) -> None:
    """From another thread: the engine answers, then never again."""
    asking = threading.Thread(target=lambda: rig.applianced.fault(kind="eat"), daemon=True)
    asking.start()
    asking.join(ENGINE_TIMEOUT_S)


def lose_both_cards(rig: Rig) -> None:
    """One by Xid 79, and the service goes on with the other; then that one, in words; PARKED; a reboot brings both back."""
    before = rig.applianced.status()["generation"]
    rig.kernel_says(XID_79.format(card=1))
    rig.applianced.wait_state("serving", "degraded", above=before)
    assert "CUDA_VISIBLE_DEVICES=GPU-00000001" in Path(f"/proc/{engine_pid(rig)}/environ").read_text()
    rig.nvml.calls()
    rig.kernel_says("NVRM: GPU 0000:02:00.0: GPU has fallen off the bus.")
    rig.applianced.wait_state("parked")
    assert not [call for call in rig.nvml.calls() if call.endswith(" 0")], "a lost card was asked about"
    reboot(rig)


def lose_a_card_by_nvml(rig: Rig) -> None:
    """GPU_IS_LOST, and the kernel says nothing; then a reboot."""
    before = rig.applianced.status()["generation"]
    rig.nvml.order("lost 1")
    rig.applianced.wait_state("serving", "degraded", above=before)
    reboot(rig)


def reboot(rig: Rig) -> None:
    """Everything ends at once; another boot, with all cards."""
    rig.applianced.process.kill()
    rig.applianced.process.wait()
    rig.nvml.order()
    rig.new_boot()
    rig.restart_applianced()


def hang_nvml(rig: Rig) -> None:
    """A card that does not answer NVML: the sensor tells, the engine goes on; then it answers again."""
    rig.nvml.order("hang 0")
    wait_for(lambda: not rig.applianced.status()["sensors"]["nvml"]["ok"], "the sensor tells")
    rig.nvml.order()


def crash_on_a_full_disk(rig: Rig) -> None:
    """Not a byte of room: served all the same. What the database has no room for is kept in memory and written when there is some."""
    before = rig.applianced.status()["generation"]
    rig.fill_disk()
    os.kill(engine_pid(rig), signal.SIGSEGV)
    try:
        rig.applianced.wait_state("serving", "degraded", above=before)
    finally:
        rig.free_disk()


def crash_after_a_jump_of(offset_s: int) -> Callable[[Rig], None]:
    """The wall clock is set, the engine crashes, the clock is set right again."""

    def do(rig: Rig) -> None:
        before = rig.applianced.status()["generation"]
        rig.set_clock(offset_s)
        pid = engine_pid(rig)
        rig.kernel_says(f"NVRM: Xid (PCI:0000:01:00): 31, pid={pid}, name=python, MMU Fault: ENGINE GRAPHICS")
        os.kill(pid, signal.SIGABRT)
        rig.applianced.wait_state("serving", "degraded", above=before)
        rig.set_clock(0)

    return do


def kill_applianced(rig: Rig) -> None:
    """kill -9: the engine goes with it, and systemd starts it again."""
    pid = engine_pid(rig)
    rig.applianced.process.kill()
    rig.applianced.process.wait()
    wait_for(lambda: not is_alive(pid), "the engine goes with it", 5)
    rig.restart_applianced()


def kill_applianced_in_a_recovery(rig: Rig) -> None:
    """kill -9 while the engine's group is being cleared and the incident is being written."""
    os.kill(engine_pid(rig), signal.SIGKILL)
    time.sleep(0.01)
    rig.applianced.process.kill()
    rig.applianced.process.wait()
    rig.restart_applianced()


def restart_by_a_person(rig: Rig) -> None:
    """`appliancectl restart`: no incident."""
    before = rig.applianced.status()["generation"]
    rig.applianced.ask("restart", reason="chaos")
    rig.applianced.wait_state("serving", "degraded", above=before)


def drain_and_resume(rig: Rig) -> None:
    """`appliancectl drain`, then `resume`: no incident."""
    rig.applianced.ask("drain", reason="chaos")
    rig.applianced.wait_state("parked")
    rig.applianced.ask("resume")


def reload(rig: Rig) -> None:
    """SIGHUP."""
    rig.applianced.process.send_signal(signal.SIGHUP)


def faults_for(rig: Rig) -> list[Fault]:
    """All that can be done on this machine."""
    hang = frozenset({"engine_watchdog"})
    illegal = frozenset({"cuda_illegal_access"})
    unknown = frozenset({"unknown"})
    lost = frozenset({"gpu_off_bus", "host_power_reset"})  # the card, and then a reboot that nobody announced
    found = [
        Fault("kill -9", by_signal(signal.SIGKILL), frozenset({"killed_unknown"})),
        Fault("kill -SEGV", by_signal(signal.SIGSEGV), frozenset({"segfault_native"})),
        Fault("kill -ABRT", by_signal(signal.SIGABRT), unknown),
        Fault("kill -QUIT", by_signal(signal.SIGQUIT), frozenset({"external_sigterm"})),
        Fault("kill -TERM", by_signal(signal.SIGTERM), frozenset({"external_sigterm"})),
        Fault("kill -ILL", by_signal(signal.SIGILL), frozenset({"sigill_cpu"}), parks=True),
        Fault("kill -STOP", by_signal(signal.SIGSTOP), hang),
        Fault("kill -9 of the next life while it loads", while_loading, frozenset({"killed_unknown"})),
        Fault("a blocked loop", by_itself(kind="hang"), hang),
        Fault("a closed socket", by_itself(kind="deaf"), hang),
        Fault("a decode that stands still", by_itself(kind="stall"), hang),
        Fault("500 to every prompt", by_itself(kind="refuse"), hang),
        Fault("a fatal line and no death", says(ILLEGAL_ACCESS), illegal),
        Fault("a fatal line and a death with 0", says(ILLEGAL_ACCESS, then={"kind": "exit", "code": 0}), illegal),
        Fault("out of memory in a prefill, then SIGKILL", says(*OUT_OF_MEMORY), frozenset({"cuda_oom_prefill"})),
        Fault("a death with 0", by_itself(kind="exit", code=0), unknown),
        Fault("a death with 1", by_itself(kind="exit", code=1), unknown),
        Fault("out of address space", out_of_address_space, frozenset({"host_oom"})),
        Fault("a flood of its log", by_itself(kind="flood", lines=20000)),
        Fault("another program's Xid", lambda rig: rig.kernel_says(APPLICATION_XID)),
        Fault("an NVML that hangs", hang_nvml),
        Fault("a clock a day ahead", crash_after_a_jump_of(DAY_S), illegal),
        Fault("a clock a day back", crash_after_a_jump_of(-DAY_S), illegal),
        Fault("kill -9 of the gateway", lambda rig: rig.kill_gateway()),
        Fault("a restart by a person", restart_by_a_person),
        Fault("a drain by a person", drain_and_resume),
        Fault("SIGHUP", reload),
        Fault("Xid 79 on both cards", lose_both_cards, lost, restarts=True),
        Fault("NVML says that a card is lost", lose_a_card_by_nvml, lost, restarts=True),
        Fault("kill -9 of applianced", kill_applianced, frozenset({"supervisor_died"}), restarts=True),
        Fault(
            "kill -9 of applianced in a recovery",
            kill_applianced_in_a_recovery,
            frozenset({"killed_unknown", "supervisor_died"}),
            certain=False,
            restarts=True,
        ),
    ]
    if rig.memory_cgroup is not None:
        found.append(Fault("the kernel's OOM killer", out_of_host_memory, frozenset({"host_oom"})))
    if rig.disk_is_small:
        found.append(Fault("a crash on a full disk", crash_on_a_full_disk, frozenset({"segfault_native"})))
    return found
