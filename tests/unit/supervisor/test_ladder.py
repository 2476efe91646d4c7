"""The rungs of a configuration: the planner's, as far as the engine can tell them apart."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.backends import backend_of
from appliance.config.schema import Config, EngineTable, ModelTable
from appliance.core.causes import Cause
from appliance.core.plan import GpuFacts, Rung
from appliance.core.states import EngineState
from appliance.core.units import GIB
from appliance.planner.calibration import Calibration, Proof, Setting
from appliance.planner.gpus import gpu_facts
from appliance.planner.inputs import Measured
from appliance.supervisor import events as ev
from appliance.supervisor.ladder import Ladders, facts_of
from tests.unit.planner import shapes
from tests.unit.supervisor.machine_cases import Drive, make_diagnosis, make_spec, make_state


def ladders(config: Config, known: Calibration | None = None, place: GpuFacts | None = None) -> Ladders:
    """Of the configured backend and model."""
    return Ladders(backend_of(config), config, facts_of(config), known, place)


def rungs(config: Config) -> tuple[Rung, ...]:
    """Of the configured backend, without a card."""
    return ladders(config).standing()


def native(folder: Path, **engine: object) -> Config:
    """A configuration of the built-in engine."""
    return replace(Config(), model=ModelTable(path=str(folder)), engine=replace(EngineTable(), **engine))  # type: ignore[arg-type]


def test_each_rung_asks_for_less_and_says_what_it_costs(tmp_path: Path) -> None:
    """From what is configured down to one sequence at a time; nothing ever asks for more; no two are the same."""
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 8192}')
    ladder = rungs(native(tmp_path))
    settings = [(rung.prefill_chunk_tokens, rung.max_running, rung.context_length_tokens) for rung in ladder]
    assert [rung.index for rung in ladder] == list(range(len(ladder)))
    assert settings[:4] == [(256, 8, 8192), (128, 8, 8192), (128, 4, 8192), (128, 4, 4096)]
    assert ladder[-1].max_running == 1
    assert len(set(settings)) == len(settings)
    assert all(all(after <= before for after, before in zip(*pair, strict=True)) for pair in zip(settings[1:], settings, strict=False))
    assert all(rung.gives_up and rung.gains for rung in ladder[1:])


def test_what_cannot_be_less_ends_the_ladder(tmp_path: Path) -> None:
    """One sequence, the smallest chunk, a context that nobody knows: there is only what is configured."""
    assert len(rungs(native(tmp_path / "missing", prefill_chunk_tokens=16, max_running=1))) == 1


def test_rungs_that_would_be_the_same_command_are_one() -> None:
    """Somebody's own engine that takes one number of the rung has as many rungs as that number has values; one that takes none has one."""
    engine = EngineTable(backend="custom", command=("srv", "{socket}"))
    assert len(rungs(replace(Config(), engine=engine))) == 1
    ladder = rungs(replace(Config(), engine=replace(engine, command=("srv", "{socket}", "{max_running}"), max_running=8)))
    assert [(rung.index, rung.max_running) for rung in ladder] == [(0, 8), (1, 4), (2, 2), (3, 1)]


def test_an_engine_on_a_card_has_a_fraction_and_features_to_give_up(tmp_path: Path) -> None:
    """SGLang's rungs lower the fraction and switch things off; each is another command line."""
    engine = EngineTable(backend="sglang", version="0.5.17", context_length_tokens=102_400)
    ladder = rungs(replace(Config(), model=ModelTable(path=str(tmp_path)), engine=engine))
    assert len(ladder) > 8
    assert ladder[-1].mem_fraction < ladder[0].mem_fraction
    assert "overlap_schedule" in ladder[-1].features_off


def test_rungs_on_a_card_have_plans_that_stand_on_what_was_measured(tmp_path: Path) -> None:
    """The chain of each rung at its own fraction and chunk; measured weights and free memory go into all of them, a proved peak is carried
    over to each chunk by the formula."""
    (tmp_path / "config.json").write_text(json.dumps(shapes.hybrid_27b()))
    engine = EngineTable(backend="sglang", version="0.5.17", context_length_tokens=102_400, kv_dtype="fp8_e4m3", max_running=3)
    config = replace(Config(), model=ModelTable(path=str(tmp_path)), engine=engine)
    card = gpu_facts("rtx3090")
    bare = ladders(config, None, card).standing()
    assert all(rung.plan is not None and rung.plan.mem_fraction == rung.mem_fraction for rung in bare)
    setting = Setting.of(bare[0])
    known = Calibration(
        "GPU-1", "sglang", "0.5.17", "m", measured=Measured(23 * GIB, 17 * GIB, source="the start of 07:00"), setting=setting,
        proofs=(Proof(setting, 102_394, GIB, GIB, True, "as judged"),),
    )  # fmt: skip
    ladder = ladders(config, known, card).standing()
    plans = [rung.plan for rung in ladder if rung.plan is not None]
    assert {(plan.free_at_start_bytes, plan.weight_bytes) for plan in plans} == {(23 * GIB, 17 * GIB)}
    assert plans[0].activation_peak_bytes == GIB
    halved = next(rung.plan for rung in ladder if rung.prefill_chunk_tokens == ladder[0].prefill_chunk_tokens // 2)
    assert halved is not None
    assert 0.5 * GIB < halved.activation_peak_bytes < 0.75 * GIB


def test_without_a_model_or_a_card_there_is_a_ladder_all_the_same(tmp_path: Path) -> None:
    """Whoever starts the engine says what is missing."""
    config = replace(Config(), model=ModelTable(path=str(tmp_path / "none")), engine=EngineTable(backend="sglang", version="0.5.17"))
    assert all(rung.plan is None for rung in ladders(config, None, gpu_facts("rtx3090")).standing())
    (tmp_path / "config.json").write_text("{")
    config = replace(config, model=ModelTable(path=str(tmp_path)))
    assert len(ladders(config, None, gpu_facts("rtx3090")).standing()) > 8


def test_without_a_card_the_machines_memory_is_what_ran_out(tmp_path: Path) -> None:
    """Half the KV cache, of which weights and engine are no part; a pool that is too small keeps its size; nothing else is new."""
    (tmp_path / "config.json").write_text(json.dumps(shapes.dense()))
    engine = EngineTable(backend="vllm", version="0.32.0", context_length_tokens=8192)
    config = replace(Config(), model=ModelTable(path=str(tmp_path)), engine=engine)
    facts = facts_of(config)
    assert facts is not None
    on_cpu = Ladders(backend_of(config), config, facts, machine_bytes=64 * GIB)
    held, first = (facts.weight_bytes + GIB) / (64 * GIB), on_cpu.standing()[0]
    smaller, shorter = on_cpu.offers(first, Cause.HOST_OOM), on_cpu.offers(first, Cause.KV_POOL_TOO_SMALL, (), 5000)
    assert smaller and shorter
    assert (smaller[0].index, smaller[0].prefill_chunk_tokens) == (1, first.prefill_chunk_tokens)
    assert smaller[0].mem_fraction - held == pytest.approx((first.mem_fraction - held) / 2, abs=0.001)
    assert {rung.mem_fraction for rung in shorter} == {first.mem_fraction}
    assert [rung.context_length_tokens for rung in shorter] == [4096, 2048, 1024]
    assert on_cpu.offers(first, Cause.SEGFAULT_NATIVE) is None
    assert on_cpu.offers(replace(first, context_length_tokens=0), Cause.KV_POOL_TOO_SMALL) is None  # it finds its context itself


def test_memory_that_ran_out_on_the_cpu_is_left_before_the_failed_starts_are_used_up(tmp_path: Path) -> None:
    """Once more as it was, for it may have been another program's doing; the third start has half the KV cache."""
    config = replace(Config(), model=ModelTable(path=str(tmp_path)), engine=EngineTable(backend="vllm", version="0.32.0"))
    on_cpu = Ladders(backend_of(config), config, None, machine_bytes=24 * GIB)
    drive, fractions = Drive(make_state(ladder=on_cpu.standing())).give(ev.Started(), ev.NoGpu("no card")), []
    for generation in (1, 2, 3):
        rung = drive.state.rung
        fractions.append(rung.mem_fraction)
        drive.give(ev.Planned(generation, make_spec(generation, rung)), ev.EngineExited(generation, "exit 1"), ev.GroupEmpty(generation))
        offers = on_cpu.offers(rung, Cause.HOST_OOM, drive.state.history.tried)
        drive.give(ev.Diagnosed(generation, make_diagnosis(Cause.HOST_OOM), f"inc-{generation}", 0.0, None, offers))
        drive.give(ev.TimerFired(generation, ev.Timer.BACKOFF))
    assert fractions[:2] == [0.9, 0.9]
    assert fractions[2] < 0.5
    assert drive.state.state is EngineState.PARKED
