"""The ladder in force is the planner's: for each cause the supervisor moves to the rung that was worked out for it, from where it stood."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from appliance.backends import backend_of
from appliance.core.causes import Cause
from appliance.core.plan import GpuFacts, Rung
from appliance.core.states import ANSWERING, EngineState
from appliance.planner.gpus import gpu_facts
from appliance.planner.inputs import Measured
from appliance.planner.ladder import FAMILIES
from appliance.supervisor import events as ev
from appliance.supervisor.incidents import IncidentStore
from appliance.supervisor.ladder import Ladders, facts_of
from appliance.supervisor.machine.rungs import relaid
from appliance.supervisor.policy import TABLE, Response
from appliance.supervisor.settings import MachineSettings
from tests.unit.planner import shapes
from tests.unit.supervisor.computed import MEASURED, Story, article, model_folder

OOM, SMALL = Cause.CUDA_OOM_PREFILL, Cause.KV_POOL_TOO_SMALL


@pytest.mark.parametrize("cause", [cause for cause, row in TABLE.items() if row.response in (Response.SAFER, Response.SAME_THEN_SAFER)])
def test_every_cause_that_a_rung_may_help_against_has_moves(cause: Cause) -> None:
    """Where the policy would go on with a safer rung, the planner knows which."""
    assert cause in FAMILIES


def test_the_articles_crash_goes_down_the_articles_way(tmp_path: Path) -> None:
    """0.95 with 0.65 GiB of headroom runs out of memory: half the chunk, no context lost; once more: 0.93 and 102,400."""
    story = Story(article(tmp_path / "m"), measured=MEASURED)
    assert story.rung.plan is not None
    assert story.rung.plan.headroom_bytes / 2**30 == pytest.approx(0.65, abs=0.02)
    story.fails(OOM)
    assert (story.rung.mem_fraction, story.rung.prefill_chunk_tokens, story.rung.context_length_tokens) == (0.95, 1024, 119_808)
    story.fails(OOM)
    assert (story.rung.mem_fraction, story.rung.prefill_chunk_tokens, story.rung.context_length_tokens) == (0.93, 1024, 102_400)
    assert (story.rung.index, story.state.state) == (2, EngineState.DEGRADED)
    assert "gives up long prompts: a context of 102,400 tokens instead of 119,808" in story.state.sentence


def test_a_pool_too_small_raises_the_fraction(tmp_path: Path) -> None:
    """The other direction: as far as the pool is short and the headroom covers the peak, the context cut to what then fits."""
    story = Story(article(tmp_path / "m", mem_fraction=0.80), measured=MEASURED).fails(SMALL, at_start=True).up()
    assert (story.rung.index, story.rung.mem_fraction, story.rung.context_length_tokens) == (1, 0.94, 109_568)
    assert "headroom" in story.rung.gives_up
    enough = Story(article(tmp_path / "m", mem_fraction=0.80, context_length_tokens=32_768), measured=MEASURED)
    enough.fails(SMALL, at_start=True)
    assert (enough.rung.mem_fraction, enough.rung.context_length_tokens) == (0.84, 32_768)


def test_opposite_refusals_leave_the_fraction_alone(tmp_path: Path) -> None:
    """Out of memory, then too small a pool, by turns: the fraction stays from then on, other things move, and it ends PARKED."""
    story = Story(article(tmp_path / "m"), measured=MEASURED, start_failures_max=99).fails(OOM).fails(OOM)
    fraction, seen = story.rung.mem_fraction, [story.rung]
    for cause in [SMALL, OOM] * 20:
        story.fails(cause, at_start=cause is SMALL).up()
        if story.state.state is EngineState.PARKED:
            break
        seen.append(story.rung)
    assert story.state.state is EngineState.PARKED
    assert {rung.mem_fraction for rung in seen} == {fraction}
    assert len(seen) > 3


def test_an_illegal_access_switches_off_one_thing_after_another(tmp_path: Path) -> None:
    """Each setting twice, for it may have been chance: overlap, drafter, attention kernels, one card, half the sequences; then PARKED."""
    config = article(tmp_path / "m", tensor_parallel=2, draft_tokens=3)
    story, off, rungs = Story(config, replace(gpu_facts("rtx4090"), nvlinks=4), cards=2, start_failures_max=99), [], []
    while story.state.state in ANSWERING:
        rungs.append(story.rung)
        off.append(len(story.rung.features_off))
        story.fails(Cause.CUDA_ILLEGAL_ACCESS)
    assert off[:8] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert rungs[6].features_off == {"overlap_schedule", "speculative", "attention_backend"}
    assert [rung.tensor_parallel for rung in rungs[:10]] == [2] * 8 + [1] * 2
    assert rungs[10].max_running == 1
    assert all(rungs.count(rung) == 2 for rung in rungs)
    assert "no setting is left that would help" in story.state.sentence


def test_a_hang_between_cards_gives_up_p2p_then_the_all_reduce_then_a_card(tmp_path: Path) -> None:
    """A transport that never worked is not tried a second time; after the last there is nothing that would help."""
    config = article(tmp_path / "m", tensor_parallel=2)
    story, went = Story(replace(config, gpu=replace(config.gpu, p2p="on")), cards=2, start_failures_max=99), []
    for _ in range(3):
        story.fails(Cause.NCCL_P2P_HANG)
        went.append((sorted(story.rung.features_off), story.rung.tensor_parallel))
    assert went == [(["p2p"], 2), (["custom_all_reduce", "p2p"], 2), (["custom_all_reduce", "p2p"], 1)]
    assert story.fails(Cause.NCCL_P2P_HANG).state.state is EngineState.PARKED


def test_consumer_cards_without_nvlink_begin_without_direct_traffic(tmp_path: Path) -> None:
    """Neither P2P nor the engine's own all-reduce: the first hang between them leaves one card, for no rung takes off what is off."""
    story = Story(article(tmp_path / "m", tensor_parallel=2), cards=2)
    assert story.rung.features_off == {"p2p", "custom_all_reduce"}
    story.fails(Cause.NCCL_P2P_HANG)
    assert (story.rung.index, story.rung.tensor_parallel) == (1, 1)


@pytest.mark.parametrize("folder", [True, False])
def test_no_fixed_step_takes_off_what_is_off(folder: bool, tmp_path: Path) -> None:
    """Also where the model cannot be read; NVLink, other cards, and the owner's word keep direct traffic."""
    config = article(tmp_path / "m", tensor_parallel=2)
    facts = facts_of(config) if folder else None
    backend, direct = backend_of(config), {"p2p", "custom_all_reduce"}

    def rungs(card: GpuFacts, word: str = "auto") -> tuple[Rung, ...]:
        told = replace(config, gpu=replace(config.gpu, p2p=word))
        return Ladders(backend, told, facts, place=card).standing()

    plain, bridged = gpu_facts("rtx3090"), replace(gpu_facts("rtx3090"), nvlinks=4)
    assert all(rung.features_off >= direct for rung in rungs(plain))
    assert not any("P2P" in rung.gives_up or "all-reduce" in rung.gives_up for rung in rungs(plain))
    assert "traffic goes through host memory" in "".join(rung.gives_up for rung in rungs(bridged)) or folder
    for first in (rungs(bridged)[0], rungs(gpu_facts("a100"))[0], rungs(plain, "on")[0]):
        assert not first.features_off
    assert rungs(gpu_facts("a100"), "off")[0].features_off == direct


def test_a_lost_card_is_gone_on_without(tmp_path: Path) -> None:
    """Xid 79: the plan for the card that is left; with both back the rung before is taken again, and the ladder is the same."""
    story = Story(article(tmp_path / "m", tensor_parallel=2), cards=2).fails(OOM)
    left = story.rung
    story.cards = 1
    story.fails(Cause.GPU_OFF_BUS, cards_left=1)
    assert (story.rung.tensor_parallel, story.rung.index, story.history.wants) == (1, 2, 1)
    assert story.rung.plan is not None
    assert story.rung.plan.fits
    story.cards = 2
    story.fails(Cause.KILLED_UNKNOWN)
    assert (story.rung, story.history.wants) == (left, None)


def test_what_was_measured_on_two_cards_is_not_held_to_be_true_of_one(tmp_path: Path) -> None:
    """Half of the weights were measured on each: the plan for one card counts with all of them."""
    halves = Measured(round(22.9 * 2**30), round(8.9 * 2**30), round(0.37 * 2**30), round(0.5 * 2**30), source="its last start")
    story = Story(article(tmp_path / "m", tensor_parallel=2), measured=halves, cards=2)
    (alone,) = story.ladders.offers(story.rung, Cause.GPU_OFF_BUS) or ()
    assert story.rung.plan is not None
    assert alone.plan is not None
    assert story.rung.plan.weight_bytes == halves.weight_bytes
    assert alone.plan.weight_bytes == pytest.approx(17.8 * 2**30, rel=0.001)
    assert alone.plan.fits


def test_a_card_that_is_missing_at_the_start_finds_its_rung(tmp_path: Path) -> None:
    """The last rung is the one for fewer cards, also below rungs that were taken for another cause; what is switched off stays off."""
    story = Story(article(tmp_path / "m", tensor_parallel=2, draft_tokens=3), cards=2)
    assert story.state.ladder[-1].tensor_parallel == 1
    story.fails(Cause.GPU_HANG_RC)
    assert story.rung.features_off == {"cuda_graph", "p2p", "custom_all_reduce"}
    last = story.state.ladder[-1]
    assert last.tensor_parallel == 1
    assert "cuda_graph" in last.features_off


def test_a_lost_card_ends_a_probation(tmp_path: Path) -> None:
    """What it had climbed from stands there no more: a later crash falls back nowhere, but goes on from the rung for one card."""
    story = Story(article(tmp_path / "m", tensor_parallel=2), cards=2, climb_after_s=60.0).fails(OOM)
    story.give(ev.TimerFired(story.state.generation, ev.Timer.CLIMB), ev.TimerFired(story.state.generation, ev.Timer.DRAIN))
    generation = story.state.generation
    story.give(ev.EngineExited(generation, "exit 0"), ev.GroupEmpty(generation))
    story.up()
    assert (story.rung.index, story.history.climbed_from) == (0, 1)
    story.cards = 1
    story.fails(Cause.GPU_OFF_BUS, cards_left=1)
    assert (story.rung.tensor_parallel, story.history.climbed_from) == (1, None)
    assert story.fails(OOM).rung.index == 2


def test_a_climb_goes_back_along_the_way_that_was_taken(tmp_path: Path) -> None:
    """One rung up, on probation; a crash falls back to the very rung that it came from, and the wait doubles."""
    story = Story(article(tmp_path / "m"), measured=MEASURED, climb_after_s=60.0).fails(OOM).fails(Cause.KV_POOL_EXHAUSTED)
    way = story.state.ladder[:3]
    story.give(ev.TimerFired(story.state.generation, ev.Timer.CLIMB), ev.TimerFired(story.state.generation, ev.Timer.DRAIN))
    generation = story.state.generation
    story.give(ev.EngineExited(generation, "exit 0"), ev.GroupEmpty(generation))
    story.up()
    assert (story.rung, story.history.climbed_from) == (way[1], 2)
    story.fails(OOM)
    assert (story.rung, story.state.ladder[:3], story.history.failed_climbs) == (way[2], way, 1)


def test_the_engines_own_estimate_becomes_the_context(tmp_path: Path) -> None:
    """vLLM refuses its start and says what would fit: "the estimated maximum model length is 15984"."""
    config = article(tmp_path / "m", backend="vllm", version="0.24.0", kv_dtype="fp8", context_length_tokens=65_536, state_slots=0)
    story = Story(config).fails(SMALL, at_start=True, estimate_tokens=15_984.0)
    assert story.rung.context_length_tokens == 15_360


def test_a_refused_proof_goes_to_the_first_rung_that_fits_what_was_measured(tmp_path: Path) -> None:
    """At once, without a failed start; where nothing safer is known any more it goes on serving."""
    story = Story(article(tmp_path / "m"), measured=MEASURED).refused()
    assert (story.rung.index, story.rung.prefill_chunk_tokens, story.history.start_failures) == (1, 1024, 0)
    assert story.rung.plan is not None
    assert story.rung.plan.fits
    rungs = [story.rung.setting]
    while (after := story.refused().rung.setting) != rungs[-1]:
        assert after not in rungs
        rungs.append(after)
    assert story.state.state is EngineState.DEGRADED
    assert story.refused().state.generation == len(rungs) + 1


def test_where_nothing_can_be_worked_out_the_fixed_steps_are_gone_down(tmp_path: Path) -> None:
    """A model folder that cannot be read: an out of memory halves the chunk all the same."""
    config = article(tmp_path / "m")
    (tmp_path / "m/config.json").write_text("{")
    story = Story(config)
    assert story.ladders.offers(story.rung, OOM) is None
    assert story.fails(OOM).rung.prefill_chunk_tokens == 1024


def test_another_configuration_is_another_story(tmp_path: Path) -> None:
    """Its rung 0 is where the next engine begins; the same one reloaded leaves the rungs that were taken, with the plans known now."""
    story = Story(article(tmp_path / "m"), measured=MEASURED).fails(OOM)
    other = Story(article(tmp_path / "m", mem_fraction=0.90), measured=MEASURED).state.ladder
    anew = relaid(story.state, other, anew=True)
    assert (anew.ladder, anew.history.rung, anew.history.below, anew.history.tried) == (other, 0, (), ())
    bare = tuple(replace(rung, plan=None) for rung in story.state.ladder)
    again = relaid(replace(story.state, ladder=bare), Story(article(tmp_path / "m"), measured=MEASURED).state.ladder)
    assert again.history == story.history
    assert [rung.setting for rung in again.ladder] == [rung.setting for rung in story.state.ladder]
    assert again.rung.plan == story.rung.plan


def test_a_person_who_goes_back_up_keeps_the_way_down(tmp_path: Path) -> None:
    """`restart --rung original` from rung 2, and `--rung 2` again: the same setting; a new failure up there may call for another way."""
    story = Story(article(tmp_path / "m"), measured=MEASURED).fails(OOM).fails(OOM)
    second = story.rung
    for asked in (0, 2, 0):
        generation = story.state.generation
        story.give(ev.RestartRequested("a person", asked), ev.TimerFired(generation, ev.Timer.DRAIN))
        story.give(ev.EngineExited(generation, "exit 0"), ev.GroupEmpty(generation))
        story.up().check()
        assert story.rung.index == asked
        assert story.state.ladder[2] == second
    story.fails(Cause.KV_POOL_EXHAUSTED)
    assert (story.rung.index, story.rung.max_running) == (1, 1)


SHAPES = st.sampled_from(["sglang", "vllm", "llamacpp"])
RUNG_CAUSES = [cause for cause, row in TABLE.items() if row.response in (Response.SAFER, Response.SAME_THEN_SAFER)]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_story_goes_in_a_circle(tmp_path: Path, data: st.DataObject) -> None:
    """Any failures in any order, with stable hours between them: no setting a third time for the same cause, none that was left for a
    safer one is come back to, an index is always a place on the ladder, and it ends PARKED."""
    backend, cards = data.draw(SHAPES), data.draw(st.sampled_from([1, 2]))
    words = {"sglang": "fp8_e4m3", "vllm": "fp8", "llamacpp": "q8_0"}
    config = article(
        tmp_path / "m", data.draw(st.sampled_from([0.80, 0.88, 0.95])), backend=backend, version="", kv_dtype=words[backend],
        context_length_tokens=data.draw(st.sampled_from([8192, 65_536])), tensor_parallel=cards, state_slots=0,
        draft_tokens=data.draw(st.sampled_from([0, 3])) if backend != "llamacpp" else 0,
    )  # fmt: skip
    story = Story(config, data.draw(st.sampled_from([gpu_facts("rtx3090"), gpu_facts("rtx4090")])), cards=cards, start_failures_max=999)
    causes = data.draw(st.lists(st.sampled_from(RUNG_CAUSES), min_size=1, max_size=4, unique=True))
    visits: dict[tuple[Cause, object], int] = {}
    way = [story.rung.setting]
    for _ in range(300):
        cause = data.draw(st.sampled_from(causes))
        visits[cause, story.rung.setting] = visits.get((cause, story.rung.setting), 0) + 1
        assert visits[cause, story.rung.setting] <= 2
        story.fails(cause, at_start=cause is SMALL).up()
        if story.state.state is EngineState.PARKED:
            break
        if story.rung.setting != way[-1]:
            assert story.rung.setting not in way, "a setting that was left is come back to"
            way.append(story.rung.setting)
    assert story.state.state is EngineState.PARKED
    assert story.history.rung == len(way) - 1


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_stable_hours_between_failures_make_no_circle_either(tmp_path: Path, data: st.DataObject) -> None:
    """What was left is not offered again, however long ago it failed; the way down is as short as it is."""
    story = Story(article(tmp_path / "m", tensor_parallel=2, draft_tokens=3), gpu_facts("rtx4090"), cards=2, start_failures_max=999)
    way = [story.rung.setting]
    for _ in range(200):
        story.fails(data.draw(st.sampled_from([OOM, SMALL, Cause.KV_POOL_EXHAUSTED, Cause.NCCL_P2P_HANG])))
        if story.state.state is EngineState.PARKED:
            break
        assert story.rung.setting not in way
        way.append(story.rung.setting)
        story.give(ev.TimerFired(story.state.generation, ev.Timer.STABLE))
        story.check()
    assert story.state.state is EngineState.PARKED


def test_the_way_survives_a_kill_at_any_moment(tmp_path: Path) -> None:
    """kill -9 of a process that goes down the ladder: what is loaded is a history that it had, whole, and the rungs of its ladder."""
    script = (
        "import sys\nfrom pathlib import Path\n"
        "from tests.unit.supervisor.test_computed_ladder import store_a_story\nstore_a_story(Path(sys.argv[1]))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    child = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment)
    assert child.stdout is not None
    for _ in range(7):
        last = child.stdout.readline().split()
    child.send_signal(signal.SIGKILL)
    told = [last, *(line.split() for line in child.stdout.read().splitlines())]
    child.wait()
    store = IncidentStore(tmp_path / "state", 10)
    memory = store.load()
    store.close()
    assert memory.generation >= int(told[-1][0])
    story = Story(article(tmp_path / "m"), measured=MEASURED)
    ladder = story.ladders.standing(memory.history.below)
    assert [rung.setting for rung in ladder[1:]] == [rung.setting for rung in memory.history.below]
    assert all(rung.plan is not None for rung in ladder)
    assert ladder[memory.history.rung].mem_fraction <= 0.95
    if memory.generation == int(told[-1][0]):
        assert (memory.history.rung, repr(ladder[memory.history.rung].mem_fraction)) == (int(told[-1][1]), told[-1][2])


def store_a_story(folder: Path) -> None:
    """Down the ladder and back up again, for ever, each step stored as applianced stores it; for a child that is killed."""
    (folder / "state").mkdir()
    store = IncidentStore(folder / "state", 10)
    store.load()
    from appliance.supervisor.incidents import Memory

    generation = 0
    while True:
        story = Story(article(folder / "m"), measured=MEASURED)
        for _ in range(4):
            story.fails(OOM)
            generation += 1
            store.remember(Memory(story.history, generation, "x"))
            store.flush()
            print(generation, story.history.rung, story.rung.mem_fraction, flush=True)


def test_the_settings_event_of_before_a_failure_takes_nothing_back(tmp_path: Path) -> None:
    """A proof's news was worked out for the forecast and is heard after the engine was lost: the rung that was taken stays."""
    story = Story(article(tmp_path / "m"), measured=MEASURED)
    forecast = story.state.ladder
    story.fails(Cause.KV_POOL_EXHAUSTED)
    taken = story.rung
    story.give(ev.SettingsChanged(MachineSettings(), forecast))
    assert (story.rung.setting, story.rung.index) == (taken.setting, 1)
    story.check()


def test_llama_cpp_is_told_of_every_step(tmp_path: Path) -> None:
    """A fraction means nothing to it: what it is offered differs in what it is told, and the context shrinks."""
    shape = shapes.dense(max_position_embeddings=32_768)
    config = article(
        tmp_path / "m", backend="llamacpp", version="", kv_dtype="auto", context_length_tokens=32_768, max_running=2, state_slots=0,
        prefill_chunk_tokens=512,
    )  # fmt: skip
    model_folder(tmp_path / "m", shape)
    story, told = Story(config), set()
    while story.state.state in ANSWERING:
        told.add(story.ladders._backend.told(config, story.rung))
        story.fails(OOM)
    assert len(told) == story.history.rung + 1
    assert story.history.rung > 1
