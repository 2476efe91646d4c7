"""What would make a refused plan run: the cheapest changes, each confirmed by planning again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from appliance.core.errors import BudgetError
from appliance.core.units import GIB, format_bytes
from appliance.planner.chain import gib
from appliance.planner.choose import attempt
from appliance.planner.elements import dtype_bytes, is_16_bit
from appliance.planner.gpus import visible_of_label
from appliance.planner.inputs import Choice, Measured, PlanInputs, PlanRefused, Shortfall, WayOut, counted

SHOWN = 3
AUTO = "auto"
"""As the value of an option: as if it had not been given."""
FOUR_BIT_SHARE = 4.25 / 16
_CARD_LABELS_GIB = (8, 12, 16, 24, 32, 48, 64, 80, 96, 141, 192, 288, 384, 512, 768, 1024, 1536, 2048)
_CARDS = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class _Change:
    """One change and how a person would ask for it."""

    words: str
    options: tuple[str, ...]
    inputs: PlanInputs


def plan(inputs: PlanInputs) -> Choice:
    """Choose, or refuse with ways out.

    Raises:
        PlanRefused: it cannot run; `ways_out` are the three cheapest changes, each planned again.
        PlanInputError: something that was asked for cannot be.
    """
    result = attempt(inputs)
    if isinstance(result, Choice):
        return result
    raise PlanRefused(result, ways_out(inputs, result))


def ways_out(inputs: PlanInputs, shortfall: Shortfall) -> tuple[WayOut, ...]:
    """The cheapest changes that work by themselves; where none does, the smallest pile of them; a larger card in the end."""
    found: list[WayOut] = []
    for changes in _changes(inputs, shortfall):
        way = next((way for way in (_confirmed(change, shortfall) for change in changes) if way is not None), None)
        if way is not None:
            found.append(way)
        if len(found) == SHOWN:
            return tuple(found)
    alone = {way.options[:2] for way in found}
    if not any(options[0] == "--weights" for options in alone):
        found += [way for way in _both(inputs, shortfall) if way.options[:2] not in alone]
    found += _larger_card(inputs, shortfall) if len(found) < SHOWN else []
    return tuple((found or _piled(inputs, shortfall))[:SHOWN])


def _confirmed(change: _Change, shortfall: Shortfall) -> WayOut | None:
    try:
        result = attempt(change.inputs)
    except BudgetError:  # a change that does not suit the model, such as two cards for 9 heads
        return None
    return WayOut(change.words, _gain(result, shortfall), change.options, result.plan) if isinstance(result, Choice) else None


def _gain(result: Choice, shortfall: Shortfall) -> str:
    plan, before = result.plan, shortfall.plan
    words = f"{plan.context_length_tokens:,} tokens of context at {plan.mem_fraction:g}"
    if plan.headroom_bytes > before.headroom_bytes:
        words += f", {gib(plan.headroom_bytes - before.headroom_bytes)} more headroom"
    return words


def _changes(inputs: PlanInputs, shortfall: Shortfall) -> Iterator[Iterator[_Change]]:
    """Kinds of change, cheapest first: what costs nothing, then speed, concurrency, context, hardware. Of each kind the least is taken."""
    for make in (_other_fraction, _vision_off, _smaller_chunk, _fp8_kv, _half_state, _drafter_off, _fewer_sequences, _graphs_off):
        yield make(inputs)
    yield _shorter_context(inputs, shortfall)
    for make in (_more_cards, _four_bits):
        yield make(inputs)


def _other_fraction(inputs: PlanInputs) -> Iterator[_Change]:
    if inputs.mem_fraction is None:
        return
    yield _Change("a fraction of our choice", ("--mem-fraction", AUTO), replace(inputs, mem_fraction=None))


def _vision_off(inputs: PlanInputs) -> Iterator[_Change]:
    if inputs.model.vision_weight_bytes and not inputs.language_only and inputs.measured.weight_bytes is None:
        freed = format_bytes(inputs.model.vision_weight_bytes)
        yield _Change(f"text only: {freed} of vision tower unloaded", ("--language-only",), replace(inputs, language_only=True))


def _smaller_chunk(inputs: PlanInputs) -> Iterator[_Change]:
    chunk = inputs.prefill_chunk_tokens or (512 if inputs.engine == "llamacpp" else 2048)
    while chunk >= 512:
        chunk //= 2
        yield _Change(f"a prefill chunk of {chunk:,}", ("--chunk", str(chunk)), replace(inputs, prefill_chunk_tokens=chunk))


def _fp8_kv(inputs: PlanInputs) -> Iterator[_Change]:
    word = inputs.model.dtype if inputs.kv_dtype in ("auto", "") else inputs.kv_dtype
    if inputs.engine == "native" or not is_16_bit(word):
        return
    half = "q8_0" if inputs.engine == "llamacpp" else "fp8_e4m3"
    yield _Change(f"a KV cache in {half}", ("--kv-dtype", half), replace(inputs, kv_dtype=half))


def _half_state(inputs: PlanInputs) -> Iterator[_Change]:
    linear = inputs.model.linear
    if linear is None or inputs.measured.linear_state_bytes is not None or inputs.engine not in ("sglang", "vllm"):
        return
    if dtype_bytes(inputs.state_dtype or linear.state_dtype) > 2:
        yield _Change("linear state in bfloat16", ("--ssm-dtype", "bfloat16"), replace(inputs, state_dtype="bfloat16"))


def _drafter_off(inputs: PlanInputs) -> Iterator[_Change]:
    if inputs.draft_tokens:
        yield _Change("no speculative decoding", ("--draft-tokens", "0"), replace(inputs, draft_tokens=0))


def _fewer_sequences(inputs: PlanInputs) -> Iterator[_Change]:
    running = inputs.max_running or 8
    while running > 1:
        running //= 2
        fewer = replace(inputs, max_running=running, state_slots=None)
        yield _Change(f"{counted(running)} at once", ("--max-running", str(running)), fewer)


def _graphs_off(inputs: PlanInputs) -> Iterator[_Change]:
    if inputs.engine in ("sglang", "vllm") and "cuda_graph" not in inputs.features_off and inputs.measured.fixed_bytes is None:
        off = replace(inputs, features_off=inputs.features_off | {"cuda_graph"})
        yield _Change("no CUDA graphs", ("--off", "cuda_graph"), off)


def _shorter_context(inputs: PlanInputs, shortfall: Shortfall) -> Iterator[_Change]:
    if inputs.context_length_tokens is None and not inputs.min_context_tokens:
        return
    del shortfall
    result = attempt(replace(inputs, context_length_tokens=None, min_context_tokens=0))
    if isinstance(result, Choice):
        context = min(result.plan.context_length_tokens, inputs.context_length_tokens or result.plan.context_length_tokens)
        options = ("--context", str(context), *(("--min-context", "0") if inputs.min_context_tokens else ()))
        yield _Change(f"a context of {context:,}", options, replace(inputs, context_length_tokens=context, min_context_tokens=0))


def _more_cards(inputs: PlanInputs) -> Iterator[_Change]:
    if inputs.engine == "native":
        return
    for cards in _CARDS:
        if cards > inputs.tensor_parallel:
            share = inputs.tensor_parallel / cards
            measured = inputs.measured.shared_otherwise(share)
            more = replace(inputs, tensor_parallel=cards, engines=1, measured=measured)
            shared = ("--layout", "auto", "--gpus", str(cards)) if inputs.engines > 1 else ()
            options = ("--tp", str(cards), *shared, *_measured_options(measured), *_forgotten(inputs, more))
            yield _Change(f"{cards} such cards", options, more)


def _four_bits(inputs: PlanInputs) -> Iterator[_Change]:
    model = inputs.model
    if model.quantisation or dtype_bytes(model.dtype) < 2 or inputs.engine == "native":
        return
    # Embedding, output projection and vision tower usually stay in 16 bits.
    kept = min(model.weight_bytes, 4 * model.vocab_size * model.hidden_size + model.vision_weight_bytes) // inputs.tensor_parallel
    now = inputs.measured.weight_bytes or (model.weight_bytes - model.draft_weight_bytes) // inputs.tensor_parallel
    small = min(now, kept) + round(max(0, now - kept) * FOUR_BIT_SHARE / (dtype_bytes(model.dtype) / 2))
    measured = replace(inputs.measured, weight_bytes=small)
    yield _Change(
        f"a 4-bit build of the model, about {format_bytes(small)} a card", _measured_options(measured), replace(inputs, measured=measured)
    )


def _forgotten(before: PlanInputs, after: PlanInputs) -> tuple[str, ...]:
    """Options that take back what was given and no longer holds."""
    given = (
        ("--mem-fraction", before.mem_fraction, after.mem_fraction),
        ("--free", before.measured.free_at_start_bytes, after.measured.free_at_start_bytes),
        ("--kv-pool", before.measured.kv_pool_bytes, after.measured.kv_pool_bytes),
    )
    return tuple(word for option, was, now in given if was is not None and now is None for word in (option, AUTO))


def _measured_options(measured: Measured) -> tuple[str, ...]:
    pairs = (("--weights", measured.weight_bytes), ("--linear-state", measured.linear_state_bytes))
    return tuple(word for option, size in pairs if size is not None for word in (option, f"{size}B"))


def _both(inputs: PlanInputs, shortfall: Shortfall) -> list[WayOut]:
    """A 4-bit build on as few more cards as it takes."""
    for small in _four_bits(inputs):
        for cards in _more_cards(small.inputs):
            way = _confirmed(_Change(f"{small.words} before they are shared, on {cards.words}", cards.options, cards.inputs), shortfall)
            if way is not None:
                return [way]
    return []


def _piled(inputs: PlanInputs, shortfall: Shortfall) -> list[WayOut]:
    """One change on top of another, until it runs."""
    words: list[str] = []
    options: list[str] = []
    pile: tuple[Callable[[PlanInputs], Iterator[_Change]], ...] = (
        _other_fraction, _vision_off, _smaller_chunk, _fp8_kv, _half_state, _drafter_off, _fewer_sequences, _graphs_off,
        _more_cards, _four_bits,
    )  # fmt: skip
    now = inputs
    for make in pile:
        changes = list(make(now))
        if not changes:
            continue
        last = changes[-1]
        now = last.inputs
        words.append(last.words)
        options += last.options
        shorter = next(_shorter_context(now, shortfall), None)
        for change in (_Change(" and ".join(words), tuple(options), now), shorter and _join(words, options, shorter)):
            way = _confirmed(change, shortfall) if change else None
            if way is not None:
                return [way]
    return []


def _join(words: list[str], options: list[str], change: _Change) -> _Change:
    return _Change(" and ".join((*words, change.words)), (*options, *change.options), change.inputs)


def _larger_card(inputs: PlanInputs, shortfall: Shortfall) -> list[WayOut]:
    """The smallest card on the market, or machine, that runs it unchanged."""
    for label in _CARD_LABELS_GIB:
        size = label * GIB if inputs.engine == "native" else visible_of_label(label * GIB)
        if size <= inputs.gpu.total_bytes:
            continue
        card = replace(inputs.gpu, name=f"a {label} GiB card", total_bytes=size, free_at_start_bytes=None)
        larger = replace(
            inputs, gpu=card, mem_fraction=None, measured=replace(inputs.measured, free_at_start_bytes=None, kv_pool_bytes=None)
        )
        what = "memory" if inputs.engine == "native" else "a card"
        options = ("--gpu", f"{label}GiB", *_forgotten(inputs, larger))
        way = _confirmed(_Change(f"{what} of {label} GiB", options, larger), shortfall)
        if way is not None:
            return [way]
    return []
