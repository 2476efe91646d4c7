"""Rules: what an event means in its company. Each takes one event and the case, and answers with the event made definite.

A rule answers `None` when the event means nothing here; the event then stays as it is and cannot be a root.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from appliance.core.causes import Cause
from appliance.diagnosis import rules_gpu as gpu
from appliance.diagnosis import rules_oom as oom
from appliance.diagnosis import rules_own as own
from appliance.diagnosis import rules_process as process
from appliance.diagnosis import rules_stop as stop
from appliance.diagnosis import rules_vram as vram
from appliance.diagnosis.case import Case
from appliance.diagnosis.events import Event
from appliance.diagnosis.pattern import Kind
from appliance.diagnosis.rules_survived import passed_over, survived
from appliance.diagnosis.xid import meaning_of

Rule = Callable[[Event, Case], Event | None]


def translate(event: Event) -> Event:
    """Numbers into meaning: needs no company, so it is done before anything is folded."""
    if event.name != "xid":
        return event
    code = int(float(str(event.fields.get("previous") or event.fields.get("code") or 0)))
    meaning = meaning_of(code)
    kind = Kind.SYMPTOM if meaning.cause is None else Kind.BENIGN if meaning.cause.is_ok else Kind.CAUSE
    note = f"Xid {code}: {meaning.word}"
    return replace(event, kind=kind, cause=meaning.cause, tier=meaning.tier, rank=meaning.rank, note=note, sure=code != 43)


RULES: dict[str, Rule] = {
    "address_taken": process.address_taken,
    "bad_numbers": own.bad_numbers,
    "boot": gpu.boot,
    "broken_invariant": process.broken_invariant,
    "bus_error": process.bus_error,
    "client_left": process.client_left,
    "cuda_oom": gpu.cuda_oom,
    "cuda_oom_load": gpu.cuda_oom_load,
    "cuda_oom_startup": vram.held_by_other,
    "death": process.death,
    "enospc": process.enospc,
    "exception": process.let_go,
    "exit": own.ended_without_a_word,
    "ghes_gpu": gpu.ghes_gpu,
    "hang_wait": gpu.hang_wait,
    "health_failed": process.health_failed,
    "heap_corruption": process.heap_corruption,
    "host_oom_kill": oom.host_oom_kill,
    "nccl_error": gpu.nccl_error,
    "nccl_init": gpu.nccl_init,
    "nccl_watchdog": gpu.nccl_watchdog,
    "no_module": own.no_module,
    "nvml_unknown": gpu.nvml_unknown,
    "ok_client_disconnect": process.request_dropped,
    "oom_result": oom.oom_result,
    "package_upgrade": gpu.package_upgrade,
    "pcie_correctable": gpu.pcie_correctable,
    "pcie_uncorrectable": gpu.pcie_uncorrectable,
    "segfault_line": process.segfault_line,
    "segfault_native": process.segfault,
    "sigterm": process.sigterm,
    "smi_err": gpu.smi_err,
    "start_failed": process.start_failed,
    "start_timeout": process.start_timeout,
    "stop_requested": stop.stop_requested,
    "stuck_task": gpu.stuck_task,
    "template_error": process.template_error,
    "template_request": process.template_request,
    "usage_error": own.usage_error,
    "xid": gpu.xid,
}


def settle(case: Case) -> list[Event]:
    """Every event of the case made definite."""
    settled: list[Event] = []
    for event in case.events:
        rule = RULES.get(event.name)
        definite = event if rule is None else rule(event, case) or event
        definite = process.of_another_unit(definite, case)
        if definite.cause is Cause.HOST_OOM:
            definite = own.host_memory(definite, case) or definite
        settled.append(stop.within_stop(survived(passed_over(definite, case), case), case))
    return settled
