"""When instruments go on, when they go off, and what they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from appliance.backends.forensics import instruments
from appliance.core.causes import Cause
from appliance.core.diagnosis import Citation
from appliance.core.evidence import Evidence, Source
from appliance.core.launch import Endpoint, LaunchSpec, SpareSpec
from appliance.supervisor.forensic_bench import ForensicBench
from appliance.supervisor.forensics import Suspicions
from appliance.supervisor.incidents import IncidentStore
from tests.unit.supervisor.machine_cases import make_diagnosis, make_rung


def illegal(line: str) -> object:
    """A verdict with this root line."""
    return replace(make_diagnosis(Cause.CUDA_ILLEGAL_ACCESS), root=Citation(Source.ENGINE_LOG, 7, line))


ONE, AGAIN = illegal("CUDA error: an illegal memory access at 0x7f11"), illegal("CUDA error: an illegal memory access at 0x7f99")
OTHER = illegal("RuntimeError: Triton Error [CUDA]: misaligned address")


def test_the_second_of_a_kind_switches_them_on() -> None:
    """Numbers and addresses apart they are the same; two different ones are not."""
    once = Suspicions().after_crash(ONE, ())
    assert not once.wanted
    assert not once.after_crash(OTHER, ()).wanted
    assert once.after_crash(OTHER, ()).after_crash(AGAIN, ()).wanted


@pytest.mark.parametrize(
    "cause", [Cause.CUDA_OOM_PREFILL, Cause.HOST_OOM, Cause.SEGFAULT_NATIVE, Cause.GPU_OFF_BUS, Cause.EXTERNAL_SIGTERM]
)
def test_what_is_explained_needs_none(cause: Cause) -> None:
    """A cause with an owner."""
    crash = make_diagnosis(cause)
    assert not Suspicions().after_crash(crash, ()).after_crash(crash, ()).wanted


def test_a_crash_with_a_stack_needs_none() -> None:
    """Something was there already that tells of the moment."""
    stack = (Evidence(Source.STACK, "#0 0x1 in copy ()"),)
    assert not Suspicions().after_crash(ONE, stack).after_crash(ONE, stack).wanted


def test_silent_deaths_are_alike_by_how_they_ended() -> None:
    """No line, no cause: exit 3 twice is one kind, exit 3 and exit 4 are two."""
    silent = replace(make_diagnosis(Cause.UNKNOWN), root=None)
    three, four = ((Evidence(Source.EXIT, f"exited with code {code}"),) for code in (3, 4))
    once = Suspicions().after_crash(silent, three)
    assert not once.after_crash(silent, four).wanted
    assert once.after_crash(silent, three).wanted


def test_they_go_off_when_they_have_caught_something_or_after_a_quiet_hour() -> None:
    """What was caught is not hunted again; what was not may be, after two more."""
    armed = Suspicions().after_crash(ONE, ()).after_crash(AGAIN, ())
    caught = armed.after_catch()
    assert not caught.wanted
    assert not caught.after_crash(ONE, ()).wanted
    quiet = armed.after_stable_time()
    assert not quiet.wanted
    assert not quiet.after_crash(ONE, ()).wanted
    assert quiet.after_crash(ONE, ()).after_crash(ONE, ()).wanted


@pytest.mark.parametrize("engine", ["native", "sglang", "vllm", "llamacpp", "custom"])
def test_each_engine_has_its_own(engine: str) -> None:
    """Python's for Python, CUDA's and NCCL's for who has cards; nothing that dumps the card's memory; costs are named."""
    fitted = instruments(engine, "/state/forensics/5")
    assert fitted.costs
    assert ("PYTHONFAULTHANDLER" in fitted.env) == (engine != "llamacpp")
    assert ("CUDA_ENABLE_COREDUMP_ON_EXCEPTION" in fitted.env) == (engine != "native")
    assert ("TORCH_FR_BUFFER_SIZE" in fitted.env) == (engine in ("sglang", "vllm", "custom"))
    if "CUDA_COREDUMP_GENERATION_FLAGS" in fitted.env:
        assert "skip_global_memory" in fitted.env["CUDA_COREDUMP_GENERATION_FLAGS"]
        assert fitted.env["CUDA_COREDUMP_FILE"].startswith("/state/forensics/5/")
    assert "SGLANG_CUDA_COREDUMP_BEFORE_CRASH" not in fitted.env


def spec(engine: str) -> LaunchSpec:
    """One that could be started."""
    spare = SpareSpec(("python",), {"A": "1"}, "/run", "stamp")
    return LaunchSpec(("python",), {"A": "1"}, "/run", Endpoint(port=1), "/health", 1.0, 1.0, engine, make_rung(0), spare)


def test_a_start_is_fitted_while_they_are_wanted_and_remembers_over_restarts(tmp_path: Path) -> None:
    """Engine and spare alike; after a restart of applianced too; the command of somebody else keeps its folder."""
    store = IncidentStore(tmp_path, 10)
    bench = ForensicBench(store, tmp_path / "forensics")
    assert bench.fit(spec("native"), 3) == spec("native")
    for crash in (ONE, AGAIN):
        bench.crashed(crash, ())
    bench = ForensicBench(store, tmp_path / "forensics")
    fitted = bench.make_room(bench.fit(spec("native"), 3))
    assert fitted.env["PYTHONFAULTHANDLER"] == "1" and fitted.spare is not None and fitted.spare.env["PYTHONFAULTHANDLER"] == "1"
    assert fitted.cwd == fitted.forensic == str(tmp_path / "forensics" / "3")
    assert Path(fitted.cwd).is_dir()
    assert "they cost " in fitted.notes[-1]
    assert "on since" in str(bench.sensor["detail"])
    assert bench.fit(spec("custom"), 4).cwd == "/run"
    bench.caught("inc", 1)
    assert bench.fit(spec("native"), 5) == spec("native")
    store.close()


def test_old_folders_go_and_a_folder_that_cannot_be_made_costs_no_start(tmp_path: Path) -> None:
    """The last three are kept."""
    store = IncidentStore(tmp_path, 10)
    bench = ForensicBench(store, tmp_path / "forensics")
    for crash in (ONE, AGAIN):
        bench.crashed(crash, ())
    for generation in range(8, 13):
        bench.make_room(bench.fit(spec("sglang"), generation))
    assert sorted(int(place.name) for place in (tmp_path / "forensics").iterdir()) == [10, 11, 12]
    (tmp_path / "file").touch()
    blocked = ForensicBench(store, tmp_path / "file")
    assert blocked.make_room(blocked.fit(spec("sglang"), 13)).forensic == ""
    store.close()
