"""What good starts and proof runs taught, and what of it the next plan may go by. Pure: applianced keeps it, beside its incidents.

Free memory and weights hold for a card, an engine version, a model and a number of cards, whatever the setting. What depends on the
setting is kept with it, and used for the same one alone; but the prefill peak, which the formula carries over to another chunk.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace

from appliance.core.plan import Rung
from appliance.planner.engines import rules_of
from appliance.planner.inputs import Measured, PlanInputs

PREFIX = "calibration:"
"""Of their names in the memory table of incidents.db."""
CPU = "cpu"
"""In place of a card's UUID."""
PROOFS_KEPT = 16
_TERMS = tuple(term.name for term in fields(Measured) if term.name != "source")
_OF_ANY_SETTING = ("free_at_start_bytes", "weight_bytes", "non_torch_bytes")
_OF_THE_SETTING = ("linear_state_bytes", "fixed_bytes")
_PROFILES_ITSELF = ("vllm", "llamacpp")
"""These measure their peak at each start and set it aside: what a proof sees on top is not the term."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What of a rung the measured terms depend on."""

    prefill_chunk_tokens: int
    max_running: int
    context_length_tokens: int
    kv_dtype: str = "auto"
    draft_tokens: int = 0
    features_off: frozenset[str] = frozenset()
    kv_pool_bytes: int = 0
    """Where the owner sets it."""

    @classmethod
    def of(cls, rung: Rung, kv_pool_bytes: int = 0) -> Setting:
        """A rung's."""
        return cls(
            rung.prefill_chunk_tokens, rung.max_running, rung.context_length_tokens, rung.kv_dtype,
            draft_tokens=rung.draft_tokens, features_off=rung.features_off, kv_pool_bytes=kv_pool_bytes,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Proof:
    """One worst-case prefill that was run.

    Attributes:
        peak_bytes: the most that it took for a moment; None where nothing was measured.
        left_bytes: what was free then, the rest of the KV pool taken off.
        holds: the setting may stay.
        sentence: as it was judged.
    """

    setting: Setting
    prompt_tokens: int
    peak_bytes: int | None
    left_bytes: int | None
    holds: bool
    sentence: str
    time_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """All that is known of one engine version with one model on one kind of place.

    Attributes:
        gpu: UUID of the (first) card, or "cpu".
        model: name and stamp, as `model_files.model_identity` gives them.
        model_path: where it lay at the last start.
        measured: terms of the starts so far; the latest counts.
        setting: of the start that the setting's own terms are from.
        proofs: of each setting the last, newest first.
        time_s: of the last start.
    """

    gpu: str
    engine: str
    engine_version: str
    model: str
    tensor_parallel: int = 1
    measured: Measured = field(default_factory=Measured)
    setting: Setting | None = None
    proofs: tuple[Proof, ...] = ()
    time_s: float = 0.0
    model_path: str = ""

    @property
    def key(self) -> str:
        """What it holds for: another card, engine version, model or number of cards has its own."""
        return "/".join((self.gpu, self.engine, self.engine_version or "any-version", f"tp{self.tensor_parallel}", self.model))

    def on_cards(self, cards: int) -> Calibration:
        """What of it holds for the same model on another number of cards: the weights, shared otherwise, and what is free."""
        if cards == self.tensor_parallel:
            return self
        shared = self.measured.shared_otherwise(self.tensor_parallel / cards)
        general = replace(shared, linear_state_bytes=None, fixed_bytes=None, activation_peak_bytes=None)
        return replace(self, measured=general, proofs=(), tensor_parallel=cards)

    def with_start(self, measured: Measured, setting: Setting, time_s: float) -> Calibration:
        """After a good start: what it printed counts; of what it did not print (a warm spare had loaded before) the older figures stay."""
        kept = {name: getattr(self.measured, name) for name in _TERMS}
        if setting != self.setting:
            kept = {name: size for name, size in kept.items() if name in _OF_ANY_SETTING}
        seen = {name: size for name in _TERMS if (size := getattr(measured, name)) is not None and size >= 0}
        return replace(self, measured=Measured(**{**kept, **seen}, source=measured.source), setting=setting, time_s=time_s)

    def with_proof(self, proof: Proof) -> Calibration:
        """After a proof run; of each setting the last one is kept."""
        others = (old for old in self.proofs if old.setting != proof.setting)
        return replace(self, proofs=(proof, *others)[:PROOFS_KEPT])

    def proof_of(self, setting: Setting) -> Proof | None:
        """The proof run of this very setting."""
        return next((proof for proof in self.proofs if proof.setting == setting), None)


def calibrated(inputs: PlanInputs, known: Calibration) -> PlanInputs:
    """The inputs for the next plan: what was measured, except the pool, which the next plan is to choose. What a person gave stays.

    Raises:
        PlanInputError: the inputs cannot be.
    """
    resolved = rules_of(inputs.engine).resolve(inputs)
    names = list(_OF_ANY_SETTING)
    drafting = known.setting is not None and known.setting.draft_tokens
    if bool(drafting) != bool(inputs.draft_tokens) or inputs.language_only:
        names.remove("weight_bytes")  # the drafter's are among them, or the vision tower's
    if known.setting is not None and _same_but_chunk(known.setting, resolved):
        names += _OF_THE_SETTING
    terms = {name: size for name in names if (size := getattr(known.measured, name)) is not None and size >= 0}
    peak = _peak_bytes(resolved, known)
    if peak is not None:
        terms["activation_peak_bytes"] = peak
    new = {name: size for name, size in terms.items() if getattr(inputs.measured, name) is None}
    return replace(inputs, measured=replace(inputs.measured, **new, source=known.measured.source)) if new else inputs


def best_of(known: Iterable[Calibration], inputs: PlanInputs, model: str) -> Calibration | None:
    """The newest that is about this engine, model, card and number of cards; of the version that was asked for, where one was."""
    fitting = [
        one
        for one in known
        if (one.engine, one.model, one.tensor_parallel) == (inputs.engine, model, inputs.tensor_parallel)
        and one.gpu == (inputs.gpu.uuid or CPU)
        and inputs.engine_version in ("", one.engine_version)
    ]
    return max(fitting, key=lambda one: one.time_s, default=None)


def _same_but_chunk(setting: Setting, resolved: PlanInputs) -> bool:
    """Graphs and linear state do not depend on the chunk or the context."""
    now = (resolved.running, resolved.draft_tokens, resolved.features_off)
    return (setting.max_running, setting.draft_tokens, setting.features_off) == now


def _peak_bytes(resolved: PlanInputs, known: Calibration) -> int | None:
    """The measured prefill peak; for another chunk or number of sequences, measured × worked out for these ÷ worked out for those."""
    found = _measured_peak(resolved, known)
    if found is None:
        return None
    setting, peak = found
    if (setting.prefill_chunk_tokens, setting.max_running) == (resolved.chunk, resolved.running):
        return peak
    then = _worked_out_peak(replace(resolved, prefill_chunk_tokens=setting.prefill_chunk_tokens, max_running=setting.max_running))
    return round(peak * _worked_out_peak(resolved) / then) if then else peak


def _measured_peak(resolved: PlanInputs, known: Calibration) -> tuple[Setting, int] | None:
    """That of the nearest setting: the engine's own profile, or a proof run."""
    profiled = known.measured.activation_peak_bytes
    if resolved.engine in _PROFILES_ITSELF:
        return (known.setting, profiled) if known.setting is not None and profiled is not None else None
    found = [(proof.setting, proof.peak_bytes) for proof in known.proofs if proof.peak_bytes is not None]
    return min(found, key=lambda pair: abs(pair[0].prefill_chunk_tokens - resolved.chunk), default=None)


def _worked_out_peak(resolved: PlanInputs) -> int:
    plain = replace(resolved, measured=replace(resolved.measured, activation_peak_bytes=None))
    return rules_of(plain.engine).plan_at(plain, plain.mem_fraction if plain.mem_fraction is not None else 0.9).activation_peak_bytes
