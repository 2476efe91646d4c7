"""What this box knows of its engine's memory: what good starts measured, what was proved, and the rungs' plans that follow from both."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Protocol

import structlog

from appliance.backends import Backend
from appliance.config.schema import Config
from appliance.control.codec import CodecError, from_json, to_json
from appliance.core.causes import Cause
from appliance.core.diagnosis import Citation, Confidence, Diagnosis
from appliance.core.errors import ModelError
from appliance.core.evidence import Source
from appliance.core.launch import EngineLimits, LaunchSpec
from appliance.core.plan import GpuFacts, ModelFacts, Rung
from appliance.core.units import format_bytes
from appliance.planner.calibration import CPU, PREFIX, Calibration, Proof, Setting
from appliance.planner.inputs import Measured
from appliance.planner.model_files import model_identity
from appliance.planner.proof import judge
from appliance.planner.startup_log import measured_terms, read_startup_log
from appliance.supervisor import events as ev
from appliance.supervisor.history import Tried
from appliance.supervisor.incidents import IncidentStore
from appliance.supervisor.ladder import Ladders, facts_of
from appliance.supervisor.log_ring import LogLine
from appliance.supervisor.memory_room import Look, look_at, machine_bytes, room_before_start
from appliance.supervisor.probe import Counters
from appliance.supervisor.settings import MachineSettings
from appliance.supervisor.worst_case import Outcome, Pool, WorstCase

ROOMY = 4.0
"""A plan whose headroom is so many times its prefill peak is proved in idle time: clients are not kept waiting for what is hardly in
doubt. No peak that we know of was planned worse than this."""
QUIET_S = 15.0
"""Without a request for so long, an engine is idle, where supervisor.canary_s says nothing else."""
TOKENS_MAX = 4_000_000
"""A longer prompt would be tens of megabytes of our own memory."""
LOOK_IDLE_S = 0.2
SETTLE_S = 0.5
"""A connection that broke in a proof run is a death, mostly: its own evidence comes within so long."""
LEARN_AFTER_S = 1.0
"""After an engine came back: its clients' answers first."""

log = structlog.get_logger()


class Life(Protocol):
    """What is asked of an EngineLife."""

    generation: int
    spec: LaunchSpec
    counters: Counters | None

    @property
    def lines(self) -> tuple[LogLine, ...]:
        """What it said so far."""

    @property
    def pids(self) -> tuple[int, ...]:
        """Its processes, the leader first; empty when they are gone."""


class Budget:
    """Owns the calibrations. Nothing else writes them."""

    def __init__(
        self,
        backend: Backend,
        store: IncidentStore,
        post: Callable[[ev.Event], None],
        look_at_cards: Callable[[], Awaitable[Look | None]],
        taken: Callable[[], tuple[Rung, ...]],
    ) -> None:
        """`taken`: the rungs that the history goes by now (`History.below`)."""
        self._backend = backend
        self._store = store
        self._post = post
        self._look_at_cards = look_at_cards
        self._taken = taken
        self._known = {one.key: one for document in store.recall_all(PREFIX) if (one := _read(document)) is not None}
        self._engine = (backend.name, backend.version)
        self._place, self._model = CPU, ""
        self._card: GpuFacts | None = None
        self._cards = 1
        """That share the model."""
        self._facts: tuple[tuple[str, str], ModelFacts | None] = (("", ""), None)
        """Of the model of this path and identity: reading them again costs a recovery its time."""
        self._room_bytes: int | None = None
        self._learned = False
        self._cannot = ""
        """Why the present life could not be proved."""

    def ladder(self, config: Config, below: tuple[Rung, ...] = ()) -> tuple[Rung, ...]:
        """The rungs, with plans that stand on what was measured. `below`: those that a history goes by; none: a forecast."""
        return self._ladders(config).standing(below)

    def offers(
        self, config: Config, failed: Rung, cause: Cause, tried: tuple[Tried, ...], estimated_context_tokens: int | None = None
    ) -> tuple[Rung, ...] | None:
        """The rungs that help against a cause, from the one that failed; None where they cannot be worked out (ladder.py)."""
        return self._ladders(config).offers(failed, cause, tried, estimated_context_tokens)

    def see(self, card: GpuFacts | None) -> bool:
        """A card, as it was found while no engine was on it. Whether that is news to the rungs."""
        news, self._card = card is not None and card != self._card, card or self._card
        return news

    def begin_life(self, config: Config, place: str, card: GpuFacts | None, cards: int) -> None:
        """An engine is about to be started on so many cards, the first of this UUID, or on "cpu", and the one before is gone."""
        self._place, self._card, self._cards, self._model = place, card, cards, _identity(config)
        self._room_bytes = room_before_start(os.getpid())
        self._cannot, self._learned = "", False

    def _ladders(self, config: Config) -> Ladders:
        self._model = _identity(config)
        model = (config.model.path, self._model)
        if self._facts[0] != model:
            self._facts = (model, facts_of(config))
        place = self._card if self._backend.uses_gpu else self._machine()
        without_card = self._backend.uses_gpu and self._card is None and self._place == CPU
        whole_bytes = machine_bytes() if without_card else None
        return Ladders(self._backend, config, self._facts[1], self._now, place, machine_bytes=whole_bytes)

    def _machine(self) -> GpuFacts | None:
        room = self._room_bytes or room_before_start(os.getpid())
        return GpuFacts("this machine", room, room) if room else None

    # -- proof runs ------------------------------------------------------------------------------------------------------

    async def prove(self, config: Config, life: Life, limits: EngineLimits, *, last: Callable[[], bool]) -> None:
        """Of an engine whose canary has answered and that serves nobody yet. Posts Proved, ProofRefused or ProofFailed.

        Args:
            last: whether there is no safer rung.
        """
        mode = config.ladder.prove
        if mode in ("always", "change") and self._engine[0] == "custom":
            await self.learn(config, life, untouched=True)  # its log says which engine it is
        rung = life.spec.rung
        settled = mode == "change" and self._settled(config, rung, last=last)  # first: it is all that a recovery waits for
        if mode in ("off", "idle") or settled or (mode == "change" and _is_roomy(self._planned(config, rung))):
            self._post(ev.Proved(life.generation))
            return
        await self.learn(config, life, untouched=True)
        worst = self._worst(config, limits)
        if worst is None:
            self._post(ev.Proved(life.generation))
            return
        self._post(ev.WorstCaseBegun(life.generation, worst.prompt_tokens))
        await self._judge(config, life, await worst.run(life.spec, self._looks(life)))

    async def served(self, config: Config, life: Life, limits: EngineLimits, *, last: Callable[[], bool]) -> None:
        """Of an engine that serves: keep what its start measured, and prove it in idle time where that is wanted.

        The run is given up as soon as somebody asks for anything. Posts ProofRefused, if anything.
        """
        # Engines on cards keep what a prompt's buffers took, so that the next prompt's take nothing.
        before = await self._look_at_cards() if self._place != CPU and not self._settled(config, life.spec.rung, last=last) else None
        await asyncio.sleep(LEARN_AFTER_S)
        await self.learn(config, life)
        again = False
        while config.ladder.prove in ("idle", "change") and not self._settled(config, life.spec.rung, last=last):
            await _quiet(life, config.supervisor.canary_s or QUIET_S)
            worst = self._worst(config, limits)  # another each time: the engine keeps what it has read of one that was cut short
            if worst is None:
                return
            running = asyncio.ensure_future(worst.run(life.spec, self._looks(life), before))
            try:
                while not running.done() and _requests(life) <= 1:
                    await asyncio.wait((running,), timeout=LOOK_IDLE_S)
                if running.done():
                    await self._judge(config, life, running.result(), again=again)
                    return
                again = True
                log.info("the proof run was given up, for somebody asks for something")
            finally:
                running.cancel()

    def _settled(self, config: Config, rung: Rung, *, last: Callable[[], bool]) -> bool:
        """Proved, or refused where there is nowhere else to go."""
        proof = self._now.proof_of(_setting(config, rung))
        return proof is not None and (proof.holds or last())

    def _planned(self, config: Config, rung: Rung) -> Rung:
        """The rung with its plan; one that was made before the card had been looked at gets it now."""
        return rung if rung.plan is not None else self._ladders(config).planned(rung)

    def _worst(self, config: Config, limits: EngineLimits) -> WorstCase | None:
        if max(limits.context_length_tokens, limits.max_prompt_tokens) > TOKENS_MAX:
            self._cannot = (
                f"the engine says that it takes {limits.context_length_tokens:,} tokens, and {TOKENS_MAX:,} are the most that we send"
            )
            return None
        worst = self._backend.worst_prompt(config, limits)
        if worst is None:
            self._cannot = "the engine does not say how long a prompt may be"
            return None
        pool = Pool(worst.pool_bytes, worst.pool_bytes // limits.kv_tokens if limits.kv_tokens else 0)
        return WorstCase(worst.request, worst.tokens, config.supervisor.start_deadline_s, pool)

    def _looks(self, life: Life) -> Callable[[], Awaitable[Look | None]]:
        if self._place != CPU:
            return self._look_at_cards
        pids = life.pids

        async def look() -> Look | None:
            return look_at(pids) if pids else None

        return look

    async def _judge(self, config: Config, life: Life, outcome: Outcome, *, again: bool = False) -> None:
        """Keep what came of a run, and post it.

        Args:
            again: a run before it was cut short, so that on the CPU the allocator holds some of the peak already: no less is taken to have
                been measured than was planned. What is left is as true as ever.
        """
        setting, generation = _setting(config, life.spec.rung), life.generation
        if outcome.broke:
            await asyncio.sleep(SETTLE_S)
            self._post(ev.ProofFailed(generation, f"its longest prompt broke off: {outcome.broke}"))
        elif outcome.cannot:
            self._cannot = outcome.cannot
            log.warning(f"the rung is not proved: {outcome.cannot}", generation=generation)
            self._post(ev.Proved(generation))
        elif outcome.problem:
            self._keep_proof(config, Proof(setting, outcome.prompt_tokens, None, None, False, outcome.problem, time.time()))
            self._post(ev.ProofRefused(generation, f"its proof was refused: {outcome.problem}"))
        elif outcome.reading is None:
            words = f"a prompt of {outcome.prompt_tokens:,} tokens was answered; its memory could not be looked at"
            self._keep_proof(config, Proof(setting, outcome.prompt_tokens, None, None, True, words, time.time()))
            self._post(ev.Proved(generation))
        else:
            plan, reading = self._planned(config, life.spec.rung).plan, outcome.reading
            if again and self._place == CPU and plan is not None:
                reading = replace(reading, peak_bytes=max(reading.peak_bytes, plan.activation_peak_bytes))
            verdict = judge(reading, plan.activation_peak_bytes if plan is not None else None)
            proof = Proof(
                setting, outcome.prompt_tokens, reading.peak_bytes, reading.left_bytes, verdict.holds, verdict.sentence, time.time()
            )
            self._keep_proof(config, proof)
            refused = ev.ProofRefused(generation, f"its proof was refused: {verdict.sentence}", _refusal(verdict.sentence))
            self._post(ev.Proved(generation) if verdict.holds else refused)

    def _keep_proof(self, config: Config, proof: Proof) -> None:
        log.info("the proof run is over", holds=proof.holds, result=proof.sentence)
        self._keep(self._now.with_proof(proof))
        self._post(ev.SettingsChanged(MachineSettings.of(config), self.ladder(config, self._taken())))

    # -- calibration -----------------------------------------------------------------------------------------------------

    async def learn(self, config: Config, life: Life, *, untouched: bool = False) -> None:
        """Keep what the start of this engine measured, once a life. `untouched`: it has served nobody yet, what it holds is itself."""
        if self._learned or not life.pids:
            return
        self._learned = True
        text = "\n".join(line.text for line in life.lines)
        held = look_at(life.pids).held_bytes
        (name, version), measured = await asyncio.to_thread(_measured, text, self._engine)
        self._engine = (name, version)
        if untouched and self._backend.name == "native" and self._room_bytes is not None and held is not None:
            measured = replace(measured, free_at_start_bytes=max(0, self._room_bytes - held))
        if measured == Measured(source=measured.source):
            return
        before = self._now
        after = before.with_start(measured, _setting(config, life.spec.rung), time.time())
        self._keep(replace(after, model_path=config.model.path))
        if self._now.measured != before.measured:
            self._post(ev.SettingsChanged(MachineSettings.of(config), self.ladder(config, self._taken())))

    def _keep(self, calibration: Calibration) -> None:
        self._known[calibration.key] = calibration
        self._store.keep(PREFIX + calibration.key, to_json(calibration))

    @property
    def measured(self) -> Measured:
        """What starts of this engine with this model measured; None is a term that was not."""
        return self._now.measured

    @property
    def _now(self) -> Calibration:
        """What is known of the present engine, model and place."""
        empty = Calibration(self._place, *self._engine, self._model, self._cards)
        return self._known.get(empty.key, empty)

    def status(self, config: Config, rung: Rung) -> dict[str, Any]:
        """For the status: whether the rung is proved, and what that stands on."""
        proof = self._now.proof_of(_setting(config, rung))
        if proof is None:
            return {"proved": False, "detail": f"not proved: {self._cannot or _why_not(config, rung)}", "peak_bytes": None}
        word = "proved" if proof.holds else "refused"
        return {
            "proved": proof.holds, "detail": f"{word}: {proof.sentence}", "peak_bytes": proof.peak_bytes, "left_bytes": proof.left_bytes,
            "prompt_tokens": proof.prompt_tokens, "time_s": proof.time_s,
        }  # fmt: skip


def _identity(config: Config) -> str:
    try:
        return model_identity(config.model.path) if config.model.path else config.model.name or "model"
    except ModelError:
        return config.model.name or "model"


def _is_roomy(rung: Rung) -> bool:
    """Whether its plan leaves so much that a proof can wait."""
    return rung.plan is not None and rung.plan.fits and rung.plan.headroom_bytes >= ROOMY * rung.plan.activation_peak_bytes


def _setting(config: Config, rung: Rung) -> Setting:
    return Setting.of(rung, config.engine.kv_pool_bytes if config.engine.backend == "native" else 0)


def _measured(text: str, otherwise: tuple[str, str]) -> tuple[tuple[str, str], Measured]:
    """Which engine of which version it was that started, and what it measured."""
    started = read_startup_log(text)
    measured = replace(measured_terms(started), source=f"the start of {time.strftime('%Y-%m-%d %H:%M')}")
    if started.engine in ("", otherwise[0]) or otherwise[0] == "native":
        return otherwise, measured
    return (started.engine, started.version), measured


def _refusal(sentence: str) -> Diagnosis:
    """Nothing broke, and that is said: the setting is left for what was measured."""
    return Diagnosis(
        Cause.OK_DEGRADED,
        Confidence.HIGH,
        f"The proof run found too little memory for the longest prompt that this setting promises to take: {sentence}.",
        Citation(Source.PROBE, 0, sentence, time.time()),
        remedies=("Give the engine more memory, or ask for less: appliancectl plan says what fits",),
    )


def _why_not(config: Config, rung: Rung) -> str:
    if config.ladder.prove == "off":
        return "ladder.prove is off"
    if config.ladder.prove == "change" and not _is_roomy(rung):
        return "the longest prompt has not run yet"
    if rung.plan is None or config.ladder.prove != "change":
        return "that is for idle time"
    free, peak = format_bytes(rung.plan.headroom_bytes), format_bytes(rung.plan.activation_peak_bytes)
    return f"the plan leaves {free} where {peak} are needed, so that it can wait for idle time"


def _read(document: Any) -> Calibration | None:
    """None for a record of another version, or a damaged one: as if nothing had been measured."""
    try:
        return from_json(Calibration, document)
    except CodecError:
        return None


def _requests(life: Life) -> int:
    return life.counters.running + life.counters.waiting if life.counters is not None else 0


async def _quiet(life: Life, quiet_s: float) -> None:
    """Until nobody has asked for anything for so long."""
    since_s = time.monotonic()
    while time.monotonic() - since_s < quiet_s:
        await asyncio.sleep(LOOK_IDLE_S)
        if life.counters is None or not life.counters.counts_requests or _requests(life):
            since_s = time.monotonic()
