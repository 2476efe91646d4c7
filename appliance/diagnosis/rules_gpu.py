"""Rules about the card and its memory, the links between cards, and the host below them."""

from __future__ import annotations

import re
from dataclasses import replace

from appliance.core.causes import Cause
from appliance.core.evidence import Source
from appliance.diagnosis.case import HEALTHY, Case, is_known, ours
from appliance.diagnosis.events import Event, Phase, caused
from appliance.diagnosis.pattern import Kind
from appliance.diagnosis.rules_vram import held_by_other
from appliance.diagnosis.xid import APPLICATION_CLASS

TRACEBACK_LINES = 80
"""An exception's own frames stand within so many lines above it (vLLM prints one per rank, interleaved)."""

HANDLED_LINES = 3
"""A message of several lines says within so many that its fault is passed over."""


def xid(event: Event, case: Case) -> Event | None:
    """An application-class Xid of a program that is not the engine is context."""
    code = int(float(str(event.fields.get("code") or 0)))
    foreign = code in APPLICATION_CLASS and not ours(event, case)
    if foreign and event.is_suspect:
        return replace(event, kind=Kind.SYMPTOM, cause=None, note=f"{event.note}, of {event.fields.get('name')}, which is not the engine")
    if code in APPLICATION_CLASS and event.is_suspect and not is_known(event, case) and case.outlived(event):
        return replace(event, kind=Kind.SYMPTOM, cause=None, note=f"{event.note}, of a process that the engine outlived")
    recovery = str(event.fields.get("action_code") or "")
    if code == 154 and recovery in ("0", "0x0"):
        return replace(event, kind=Kind.SYMPTOM, cause=None)
    return event


def cuda_oom(event: Event, case: Case) -> Event:
    """Somebody else's memory; else load, prefill or run time: what the failure's wrapper says, then its frames, then the last milestone."""
    if _ADVICE.search(event.text.partition("out of memory")[0][-ADVICE_LETTERS:]) is not None:
        return replace(event, kind=Kind.SYMPTOM, cause=None, fatal=False, note="advice for the case that it happens")
    if _handled(event, case):
        return caused(replace(event, fatal=False), Cause.OK_BENIGN_WARNING, tier=7, rank=34, note="the program handled it, and went on")
    held = held_by_other(event, case)
    if held is not None:
        return held
    if not event.phase.serving and case.near(event, "startup_failed", before=TRACEBACK_LINES, after=TRACEBACK_LINES):
        return caused(event, Cause.CUDA_OOM_STARTUP, note="the engine says that it failed to start")
    frames = {name: case.near(event, name, before=TRACEBACK_LINES, after=3) for name in ("frame_decode", "frame_prefill", "frame_load")}
    serving = event.phase.serving or case.near(event, "runtime_failed", before=TRACEBACK_LINES, after=TRACEBACK_LINES)
    if frames["frame_load"] and not serving:
        return caused(event, Cause.CUDA_OOM_STARTUP, note="the frames above it load, profile or capture the model")
    if frames["frame_prefill"]:
        return caused(event, Cause.CUDA_OOM_PREFILL, note="the frames above it process a prompt")
    if frames["frame_decode"]:
        return caused(event, Cause.CUDA_OOM_RUNTIME, note="the frames above it decode or draft")
    return _oom_by_phase(event, serving)


_MILD = re.compile(r"\b(?:DEBUG|INFO|WARN(?:ING)?)\b|\bW\d{3,4} |Warning: |level=(?:info|warn)", re.IGNORECASE)
"""A program's own word for what it does not fail of, before the sentence."""


ADVICE_LETTERS = 100
_ADVICE = re.compile(
    r"\b(?:[Ii]f (?:you|there|it|the|this|we)\b|[Ii]n case (?:of|you)\b|[Tt]o (?:avoid|prevent|reduce)\b|[Aa]void(?:s|ing)? |"
    r"[Pp]revent(?:s|ing)? |(?:may|might|can|could|would|will) (?:cause|lead|result|run|trigger|hit|still)\b|[Rr]isk of )[^.;:]{0,80}$"
)


def _handled(event: Event, case: Case) -> bool:
    """Whoever met it calls it a warning, or says that it is passed over; and a sign of life stands next, before any sign of death."""
    head, said, _rest = event.text.partition("out of memory")
    mild = bool(said) and event.source is Source.ENGINE_LOG and _MILD.search(head[-200:]) is not None
    if not mild and not case.near(event, "handled", before=0, after=HANDLED_LINES):
        return False
    alive = case.first_after(event, *HEALTHY)
    if alive is None:
        return False
    between = (other for other in case.events if event.order < other.order < alive.order and other.source is event.source)
    return not any(other.fatal and other.name != event.name for other in between)


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
    return held_by_other(event, case) or caused(event, Cause.CUDA_OOM_STARTUP, note="the engine was still loading")


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
    unreachable = case.last_before(event, "nccl_unreachable")
    if unreachable is not None:
        return caused(unreachable, Cause.NCCL_INIT_FAILURE, tier=2, rank=55, note="another rank could not be reached")
    return caused(event, Cause.NCCL_INIT_FAILURE, sure="unhandled" not in text)


def nccl_init(event: Event, case: Case) -> Event | None:
    """A log that ends in NCCL's start: nothing failed, nothing goes on. A guess, and marked as one."""
    later = any(other.order > event.order and other.source is event.source for other in case.events)
    if later or case.dead or case.served or case.exit.known:
        return None
    return caused(event, Cause.NCCL_P2P_HANG, tier=6, rank=45, sure=False, note="the log ends where NCCL starts")


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


def smi_err(event: Event, _case: Case) -> Event:
    """ERR! in a row of nvidia-smi."""
    return caused(event, Cause.GPU_NEEDS_RESET, tier=1, rank=25)


def nvml_unknown(event: Event, case: Case) -> Event:
    """NVML's `Unknown Error`: a container whose device cgroup was rewritten."""
    return caused(event, Cause.CONTAINER_LOST_GPU, sure=any("host" in item.text for item in case.lines_of(event.source)))


def package_upgrade(event: Event, case: Case) -> Event | None:
    """A driver package was replaced: the root of a version mismatch, nothing by itself."""
    if any(other.cause is Cause.DRIVER_LIB_MISMATCH for other in case.events):
        return caused(event, Cause.DRIVER_LIB_MISMATCH, tier=0, rank=64)
    return None


def pcie_uncorrectable(event: Event, case: Case) -> Event | None:
    """An uncorrected PCIe error of a GPU or of the port above it."""
    device = str(event.fields.get("driver") or "nvidia").lower()
    if str(event.fields.get("bdf") or "").lower().partition(".")[0] in case.cards:  # the port above reports it, or the card's own sound
        return caused(event, Cause.PCIE_ERROR, tier=0, sure="can't recover" not in event.text)  # of what, another line would tell
    if event.pattern_id == "kernel.pcie_reported":
        return replace(event, kind=Kind.SYMPTOM, note="of a device that nothing shows to be a card")
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
    if _shut_down_before(event, case):
        return replace(event, kind=Kind.SYMPTOM, note="the host was shut down in order")
    own_lines = sum(1 for _ in case.lines_of(event.source))
    if event.evidence.line <= 1 and own_lines > 1 and not case.served:
        return None
    if _peer_traffic(case):
        note = "the cards wrote into each other's memory when the host went away; its power is the other guess"
        return caused(event, Cause.P2P_UNSAFE, tier=1, rank=98, sure=False, note=note)
    return caused(event, Cause.HOST_POWER_RESET, tier=1, rank=99, note="no shutdown record and no fault stands before the new boot")


def _shut_down_before(event: Event, case: Case) -> bool:
    """In order, since the boot before: the kernel's word counts as much as systemd's."""
    records = [record.order for record in case.named("shutdown_record") if record.order < event.order]
    return bool(records) and not any(records[-1] < other.order < event.order for other in case.named("boot"))


def _peer_traffic(case: Case) -> bool:
    """The engine set up direct copies between cards and did not take that back."""
    refused = any(event.pattern_id == "vllm.custom_ar_off" for event in case.events)
    return any(not refused or " via P2P" in event.text for event in case.named("p2p_setup"))


def stuck_task(event: Event, case: Case) -> Event | None:
    """A task in uninterruptible sleep with the NVIDIA driver's frames below it."""
    if not case.has("driver_frame"):
        return None
    return caused(event, Cause.GPU_UNKILLABLE_PROCESS, tier=0, rank=84)
