"""Rules: what an event means in its company. Each takes one event and the case, and answers with the event made definite.

A rule answers `None` when the event means nothing here; the event then stays as it is and cannot be a root.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from appliance.core.causes import Cause
from appliance.core.evidence import Source
from appliance.diagnosis.case import Case, engine_like, signal_of, signal_of_code
from appliance.diagnosis.events import Event, Phase
from appliance.diagnosis.pattern import Kind
from appliance.diagnosis.xid import APPLICATION_CLASS, meaning_of

TRACEBACK_LINES = 80
"""An exception's own frames stand within so many lines above it (vLLM prints one per rank, interleaved)."""

Rule = Callable[[Event, Case], Event | None]


def caused(event: Event, cause: Cause, *, tier: int | None = None, rank: int | None = None, sure: bool = True, note: str = "") -> Event:
    """The event as a suspect (or, for `ok_*`, as harmless)."""
    kind = Kind.BENIGN if cause.is_ok else Kind.CAUSE
    return replace(
        event,
        kind=kind,
        cause=cause,
        tier=event.tier if tier is None else tier,
        rank=event.rank if rank is None else rank,
        sure=event.sure and sure,
        note=note or event.note,
    )


def translate(event: Event) -> Event:
    """Numbers into meaning: needs no company, so it is done before anything is folded."""
    if event.name != "xid":
        return event
    code = int(float(str(event.fields.get("previous") or event.fields.get("code") or 0)))
    meaning = meaning_of(code)
    kind = Kind.SYMPTOM if meaning.cause is None else Kind.BENIGN if meaning.cause.is_ok else Kind.CAUSE
    note = f"Xid {code}: {meaning.word}"
    return replace(event, kind=kind, cause=meaning.cause, tier=meaning.tier, rank=meaning.rank, note=note, sure=code != 43)


def xid(event: Event, case: Case) -> Event | None:
    """An application-class Xid of a program that is not the engine is context."""
    code = int(float(str(event.fields.get("code") or 0)))
    foreign = code in APPLICATION_CLASS and not _ours(event, case)
    if foreign and event.is_suspect:
        return replace(event, kind=Kind.SYMPTOM, cause=None, note=f"{event.note}, of {event.fields.get('name')}, which is not the engine")
    recovery = str(event.fields.get("action_code") or "")
    if code == 154 and recovery in ("0", "0x0"):
        return replace(event, kind=Kind.SYMPTOM, cause=None)
    return event


def _ours(event: Event, case: Case) -> bool:
    pid = str(event.fields.get("pid") or "")
    return engine_like(event.fields.get("name")) or (pid.isdigit() and int(pid) in case.engine_pids)


def cuda_oom(event: Event, case: Case) -> Event:
    """Load, prefill or run time: what the failure's own wrapper says, then its frames, then the last milestone."""
    for name, cause in (("startup_failed", Cause.CUDA_OOM_STARTUP),):
        if case.near(event, name, before=TRACEBACK_LINES, after=TRACEBACK_LINES) and not event.phase.serving:
            return caused(event, cause, note="the engine says that it failed to start")
    frames = {name: case.near(event, name, before=TRACEBACK_LINES, after=3) for name in ("frame_decode", "frame_prefill", "frame_load")}
    serving = event.phase.serving or case.near(event, "runtime_failed", before=TRACEBACK_LINES, after=TRACEBACK_LINES)
    if frames["frame_load"] and not serving:
        return caused(event, Cause.CUDA_OOM_STARTUP, note="the frames above it load, profile or capture the model")
    if frames["frame_prefill"]:
        return caused(event, Cause.CUDA_OOM_PREFILL, note="the frames above it process a prompt")
    if frames["frame_decode"]:
        return caused(event, Cause.CUDA_OOM_RUNTIME, note="the frames above it decode or draft")
    return _oom_by_phase(event, serving)


def _oom_by_phase(event: Event, serving: bool) -> Event:
    if event.phase is Phase.PREFILL:
        return caused(event, Cause.CUDA_OOM_PREFILL, note="the last thing the engine began was a prefill")
    if event.phase is Phase.DECODE:
        return caused(event, Cause.CUDA_OOM_RUNTIME, sure=False, note="the last thing the engine did was decoding")
    if event.phase is Phase.LOADING and not serving:
        return caused(event, Cause.CUDA_OOM_STARTUP, note="the engine was still loading")
    if event.phase is Phase.READY:
        return caused(event, Cause.CUDA_OOM_RUNTIME, sure=False, note="the engine was up; no line ties it to a prompt")
    if serving:
        return caused(event, Cause.CUDA_OOM_PREFILL, sure=False, note="the engine was up; a prefill is the usual peak, no line proves it")
    return caused(event, Cause.CUDA_OOM_RUNTIME, sure=False, note="nothing says what the engine was doing")


def cuda_oom_load(event: Event, case: Case) -> Event:
    """Buffers that llama.cpp allocates while loading, and again when a graph grows at run time."""
    if event.phase.serving:
        return cuda_oom(event, case)
    return caused(event, Cause.CUDA_OOM_STARTUP, note="the engine was still loading")


def stuck_task(event: Event, case: Case) -> Event | None:
    """A task in uninterruptible sleep with the NVIDIA driver's frames below it."""
    if not case.has("driver_frame"):
        return None
    return caused(event, Cause.GPU_UNKILLABLE_PROCESS, tier=0, rank=84)


def enospc(event: Event, case: Case) -> Event:
    """No space on /dev/shm (or out of NCCL) is shared memory; anywhere else it is a disk."""
    text = event.text.lower()
    nearby = case.near(event, "shm_too_small", before=40, after=40) or case.near(event, "shm_size", before=400, after=40)
    if "/dev/shm" in text or "nccl" in text or "posix_fallocate" in text or "shared memory" in text or nearby:
        return caused(event, Cause.SHM_TOO_SMALL, tier=2, rank=5)
    return caused(event, Cause.DISK_FULL, tier=2, rank=40)


_DEATHS: dict[str, tuple[Cause, int, int]] = {
    "SIGSEGV": (Cause.SEGFAULT_NATIVE, 1, 80),
    "SIGILL": (Cause.SIGILL_CPU, 1, 75),
    "SIGBUS": (Cause.SHM_TOO_SMALL, 2, 8),
    "SIGKILL": (Cause.KILLED_UNKNOWN, 5, 50),
    "SIGTERM": (Cause.EXTERNAL_SIGTERM, 3, 40),
    "SIGINT": (Cause.EXTERNAL_SIGTERM, 3, 41),
    "SIGHUP": (Cause.EXTERNAL_SIGTERM, 3, 42),
    "SIGQUIT": (Cause.EXTERNAL_SIGTERM, 5, 60),
}
"""Signal → cause, tier, rank. SIGABRT is missing on purpose: it says that the program gave up, never why."""


def death(event: Event, case: Case) -> Event | None:
    """A process ended by a signal: the signal names the kind of fault, a deeper event names the cause."""
    signal = signal_of(event.fields.get("signal")) or signal_of_code(event.fields.get("exit_code", ""))
    if signal is None or signal not in _DEATHS:
        return replace(event, kind=Kind.CONSEQUENCE, fatal=event.fatal and str(event.fields.get("exit_code")) != "0")
    if _stopping(signal, event, case):
        return replace(event, kind=Kind.CONSEQUENCE, fatal=False, note="during a stop")
    if signal == "SIGKILL":
        starved = _host_memory_plan(event, case)
        if starved is not None:
            return starved
        if case.has("kill_tree", "sigquit") or (case.has("wrapper") and event.source is Source.EXIT and _self_kill(case)):
            return replace(event, kind=Kind.CONSEQUENCE, note="the parent kills its own process tree after a child failed")
    cause, tier, rank = _DEATHS[signal]
    exit_only = event.source is Source.EXIT
    return caused(event, cause, tier=max(tier, 5) if exit_only else tier, rank=rank + (30 if exit_only else 0), note=f"ended by {signal}")


def _self_kill(case: Case) -> bool:
    return any(event.pattern_id in ("sglang.sigquit", "sglang.kill_tree") for event in case.events)


def _stopping(signal: str, event: Event, case: Case) -> bool:
    """Ends that belong to a stop: any while we or systemd asked for one, a worker's SIGTERM in any shutdown, SIGKILL after a drain."""
    if case.stopped_by_us or case.has("stop_requested"):
        return signal in ("SIGTERM", "SIGINT", "SIGKILL", "SIGQUIT", "SIGABRT", "SIGSEGV") and event.phase is not Phase.LOADING
    if event.source is Source.EXIT:
        return signal == "SIGKILL" and case.has("drained")
    return signal in ("SIGTERM", "SIGINT") and (event.phase is Phase.STOPPING or case.has("shutdown", "sigterm"))


def _host_memory_plan(event: Event, case: Case) -> Event | None:
    """ollama printed a plan that puts more into host memory than is free, and then its runner was killed."""
    plan = case.last_before(event, "host_memory_plan")
    free = list(case.named("host_memory_free"))
    if plan is None:
        return None
    required, partial = (float(plan.fields.get(name, 0.0)) for name in ("required_bytes", "partial_bytes"))
    free_bytes = max(
        (float(other.fields.get("free_bytes", 0.0)) + float(other.fields.get("swap_bytes", 0.0)) for other in free), default=0.0
    )
    if required - partial <= 0 or (free_bytes and required - partial < 0.85 * free_bytes):
        return None
    note = "the plan puts more into host memory than is free, then the runner was killed"
    return caused(replace(plan, fatal=True), Cause.HOST_OOM, tier=2, rank=3, sure=False, note=note)


def host_oom_kill(event: Event, case: Case) -> Event | None:
    """The kernel killed a process: ours, or somebody else's."""
    pid = str(event.fields.get("pid") or "")
    ours = engine_like(event.fields.get("name")) or (pid.isdigit() and int(pid) in case.engine_pids)
    if ours:
        return caused(event, Cause.HOST_OOM)
    return replace(
        event, name="foreign_oom", kind=Kind.SYMPTOM, note=f"the kernel killed {event.fields.get('name')}, which is not the engine"
    )


def oom_result(event: Event, _case: Case) -> Event | None:
    """systemd's OOM sentence counts for a service; on a slice it only says that something below it was killed."""
    unit = str(event.fields.get("unit") or "")
    if unit.endswith((".slice", ".scope")) and "session" not in unit:
        return caused(event, Cause.OK_BENIGN_WARNING, tier=7, rank=30, note="a slice repeats what happened to another unit below it")
    return caused(event, Cause.HOST_OOM, tier=0, rank=72)


def segfault_line(event: Event, case: Case) -> Event | None:
    """The kernel's segfault (or trap) line, if the process may be ours."""
    if not _ours(event, case):
        return replace(event, kind=Kind.SYMPTOM, note=f"of {event.fields.get('name')}, which is not the engine")
    if "invalid opcode" in event.text:
        return caused(event, Cause.SIGILL_CPU, tier=1, rank=74)
    return caused(event, Cause.SEGFAULT_NATIVE, tier=1, rank=70)


def nccl_watchdog(event: Event, case: Case) -> Event:
    """The first collective never worked, or one of many stalled."""
    sequence = event.fields.get("sequence")
    completed = [str(other.fields["completed"]) for other in case.named("nccl_watchdog", "nccl_progress") if "completed" in other.fields]
    never = sequence is not None and int(float(str(sequence))) <= 1
    if never or (sequence is None and any(value in ("0", "-1") for value in completed)):
        return caused(event, Cause.NCCL_P2P_HANG, tier=4, rank=5, note="not one collective of this group ever completed")
    return caused(event, Cause.NCCL_TIMEOUT, tier=4, rank=10, note="collectives had worked before this one")


def nccl_error(event: Event, case: Case) -> Event:
    """An NCCL error names its own cause only when nothing underneath does."""
    text = event.text.lower()
    if "out of memory" in text:
        return cuda_oom(event, case)
    return caused(event, Cause.NCCL_INIT_FAILURE, sure="unhandled" not in text)


def sigterm(event: Event, case: Case) -> Event | None:
    """A stop signal is a crash only when nobody we know asked for it and the engine did not leave in order."""
    if case.stopped_by_us or case.has("stop_requested"):
        return caused(event, Cause.OK_SHUTDOWN, tier=7, rank=20, note="the stop was asked for")
    if event.pattern_id == "native.sigterm":  # only ever stopped by applianced, whose ledger would be among the evidence
        return caused(event, Cause.EXTERNAL_SIGTERM, tier=3, rank=10, note="no record of ours asks for this stop")
    dirty = case.has("wrapper", "runtime_failed", "startup_failed") or (case.exit.known and case.exit.code != 0 and not case.has("drained"))
    if dirty or (event.phase is Phase.LOADING and not case.served):
        return caused(event, Cause.EXTERNAL_SIGTERM, tier=3, rank=10, note="no record of ours asks for this stop")
    return caused(event, Cause.OK_SHUTDOWN, tier=7, rank=20, sure=False, note="it ended in order; no record says who asked")


def smi_err(event: Event, _case: Case) -> Event:
    """ERR! in a row of nvidia-smi."""
    return caused(event, Cause.GPU_NEEDS_RESET, tier=1, rank=25)


def nvml_unknown(event: Event, case: Case) -> Event:
    """NVML's `Unknown Error`: a container whose device cgroup was rewritten."""
    return caused(event, Cause.CONTAINER_LOST_GPU, tier=0, rank=85, sure=any("host" in item.text for item in case.lines_of(event.source)))


def pcie_uncorrectable(event: Event, _case: Case) -> Event | None:
    """An uncorrected PCIe error of a GPU or of the port above it."""
    device = str(event.fields.get("driver") or "nvidia").lower()
    if device in ("nvidia", "pcieport", "vfio-pci", "pci", "aer", "nouveau"):
        return caused(event, Cause.PCIE_ERROR, tier=0, rank=10, sure=device == "nvidia")
    return replace(event, kind=Kind.SYMPTOM, note=f"of a device that {device} drives, which is no GPU")


CORRECTABLE_STORM = 10


def pcie_correctable(event: Event, case: Case) -> Event:
    """Corrected errors are harmless one by one; a storm, or some before a lost card, is the link failing."""
    lost = any(other.cause is Cause.GPU_OFF_BUS for other in case.events)
    if event.count >= CORRECTABLE_STORM or (lost and event.count >= 3):
        return caused(event, Cause.PCIE_ERROR, tier=0, rank=12, sure=lost, note=f"{event.count} corrected errors on the link")
    return caused(event, Cause.OK_BENIGN_WARNING, tier=7, rank=40, note="corrected by the link itself")


def ghes_gpu(event: Event, case: Case) -> Event | None:
    """The firmware's PCIe report names NVIDIA's vendor id; the line to quote is the one with the device."""
    if case.has("ghes_corrected"):
        return caused(event, Cause.OK_BENIGN_WARNING, tier=7, rank=40)
    device = case.last_before(event, "ghes_device")
    return caused(device or event, Cause.PCIE_ERROR, tier=0, rank=10)


def boot(event: Event, case: Case) -> Event | None:
    """A new boot without a shutdown record before it: the host went away."""
    if case.last_before(event, "shutdown_record") is not None:
        return replace(event, kind=Kind.SYMPTOM, note="the host was shut down in order")
    own_lines = sum(1 for _ in case.lines_of(event.source))
    if event.evidence.line <= 1 and own_lines > 1 and not case.served:
        return None
    peer = next((other for other in reversed(list(case.named("p2p_setup", "ready", "traffic", "decode", "prefill")))), None)
    if peer is not None and peer.name == "p2p_setup":
        return caused(
            event, Cause.P2P_UNSAFE, tier=1, rank=98, sure=False, note="the last thing before the reset was peer traffic between the cards"
        )
    return caused(event, Cause.HOST_POWER_RESET, tier=1, rank=99, note="no shutdown record and no fault stands before the new boot")


HANG_WAITS = 3


def hang_wait(event: Event, case: Case) -> Event | None:
    """vLLM's `No available shared memory broadcast block`: harmless once while loading, a hang when it repeats."""
    init = case.last_before(event, "nccl_init")
    moved_on = [
        other for other in case.events if init is not None and other.order > init.order and other.name in ("loading", "ready", "traffic")
    ]
    if init is not None and not moved_on and not case.served:
        return caused(
            init, Cause.NCCL_P2P_HANG, tier=4, rank=6, sure=False, note="the last thing it began was NCCL's start; then only waiting"
        )
    if event.phase.serving and event.count >= HANG_WAITS:
        return caused(event, Cause.ENGINE_RPC_TIMEOUT, tier=4, rank=40, sure=False, note=f"{event.count} waits in a row")
    if not case.dead:
        return caused(event, Cause.OK_BENIGN_WARNING, tier=7, rank=30, note="a single wait while something long runs")
    return None


def address_taken(event: Event, case: Case) -> Event:
    """Somebody listens there; a warning about one of several addresses is none while the engine goes on."""
    warning = "socket.cpp" in event.text and "[W" in event.text
    if warning and (case.served or not case.dead):
        return caused(event, Cause.OK_BENIGN_WARNING, tier=7, rank=33)
    return caused(event, Cause.PORT_IN_USE)


def template_request(event: Event, case: Case) -> Event:
    """A template that fails on a request: that request's fault while the engine serves others, else the template's."""
    if case.served or any(other.cause is Cause.OK_CLIENT_ERROR for other in case.events):
        return caused(event, Cause.OK_CLIENT_ERROR, tier=7, rank=22)
    return caused(event, Cause.TEMPLATE_ERROR, sure=False)


def bus_error(event: Event, case: Case) -> Event:
    """A page of a mapping on a full tmpfs; a line that gives the size of /dev/shm is the better one to quote."""
    size = case.last_before(event, "shm_size")
    return caused(replace(size, fatal=True) if size is not None else event, Cause.SHM_TOO_SMALL, tier=2, rank=8, sure=size is not None)


def nccl_init(event: Event, case: Case) -> Event | None:
    """A log that ends in NCCL's start: nothing failed, nothing goes on. A guess, and marked as one."""
    later = any(other.order > event.order and other.source is event.source for other in case.events)
    if later or case.dead or case.served or case.exit.known:
        return None
    return caused(event, Cause.NCCL_P2P_HANG, tier=6, rank=45, sure=False, note="the log ends where NCCL starts")


def heap_corruption(event: Event, _case: Case) -> Event:
    """glibc found the heap destroyed: native code wrote where it must not."""
    return caused(event, Cause.SEGFAULT_NATIVE, tier=1, rank=82, sure=False)


def client_left(event: Event, case: Case) -> Event | None:
    """A client left; if the engine died of nothing else, it died of that."""
    if case.has("wrapper") and not case.served_after(event):
        tier = 4 if event.kind is Kind.SYMPTOM else 2
        return caused(event, Cause.CLIENT_DISCONNECT_CRASH, tier=tier, rank=90, sure=False)
    if event.kind is Kind.SYMPTOM:
        return None
    return caused(event, Cause.OK_CLIENT_DISCONNECT, tier=7, rank=15)


def package_upgrade(event: Event, case: Case) -> Event | None:
    """A driver package was replaced: the root of a version mismatch, nothing by itself."""
    if any(other.cause is Cause.DRIVER_LIB_MISMATCH for other in case.events):
        return caused(event, Cause.DRIVER_LIB_MISMATCH, tier=0, rank=64)
    return None


def start_failed(event: Event, case: Case) -> Event | None:
    """systemd gave up: the first failed attempt is the root, unless a program said more."""
    first = case.first("unit_failed")
    return caused(first or event, Cause.SD_START_LIMIT, tier=5, rank=20)


RULES: dict[str, Rule] = {
    "address_taken": address_taken,
    "boot": boot,
    "bus_error": bus_error,
    "client_left": client_left,
    "cuda_oom": cuda_oom,
    "cuda_oom_load": cuda_oom_load,
    "death": death,
    "enospc": enospc,
    "ghes_gpu": ghes_gpu,
    "hang_wait": hang_wait,
    "heap_corruption": heap_corruption,
    "host_oom_kill": host_oom_kill,
    "nccl_error": nccl_error,
    "nccl_init": nccl_init,
    "nccl_watchdog": nccl_watchdog,
    "nvml_unknown": nvml_unknown,
    "oom_result": oom_result,
    "package_upgrade": package_upgrade,
    "pcie_correctable": pcie_correctable,
    "pcie_uncorrectable": pcie_uncorrectable,
    "segfault_line": segfault_line,
    "sigterm": sigterm,
    "smi_err": smi_err,
    "start_failed": start_failed,
    "stuck_task": stuck_task,
    "template_request": template_request,
    "xid": xid,
}


def settle(case: Case) -> list[Event]:
    """Every event of the case made definite."""
    settled: list[Event] = []
    for event in case.events:
        rule = RULES.get(event.name)
        settled.append(event if rule is None else rule(event, case) or event)
    return settled
