"""What may be asked for. Each refusal names the value, the limit and what to change."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import replace

from appliance.planner.chain import gib
from appliance.planner.elements import bits_of, dtype_bytes
from appliance.planner.inputs import PlanInputError, PlanInputs, as_served

CHUNK_MIN_TOKENS = 16
MEMORY_MAX_BYTES = 1 << 50
_MOST = gib(MEMORY_MAX_BYTES)
_STATE_WORDS = {"sglang": ("float32", "bfloat16", "float16"), "vllm": ("auto", "float32", "float16", "bfloat16")}
_VERSION = re.compile(r"[vb]?\d{1,9}(\.\d{1,9}){0,5}[a-z0-9.+-]{0,40}", re.IGNORECASE)
_GGML_WORDS = frozenset({"q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl", "f32", "f16", "bf16"})
_VLLM_ONLY = frozenset({"int8_per_token_head", "fp8_per_token_head", "int4_per_token_head", "fp8_inc"})


def checked(inputs: PlanInputs) -> PlanInputs:
    """The inputs, when they can be, with what is switched off in them.

    Raises:
        PlanInputError: a number is out of its range, or does not suit the model or the engine.
    """
    if not inputs.model.full_attention_layers + inputs.model.sliding_window_layers:
        found = "a model without attention layers has no KV cache to plan"
        raise PlanInputError(found, hint="its memory does not grow with the context: start the engine with its own defaults")
    _numbers(inputs)
    _context(inputs)
    _kv_dtype(inputs)
    _tensor_parallel(inputs)
    _state_dtype(inputs)
    _version(inputs)
    if inputs.model.linear and "state_float32" in inputs.features_off and dtype_bytes(inputs.state_dtype or "float32") > 2:
        return replace(inputs, state_dtype="bfloat16")
    return inputs


def _numbers(inputs: PlanInputs) -> None:
    fraction = inputs.mem_fraction
    if not 0 < inputs.red_line <= 1:
        raise PlanInputError(f"a red line of {inputs.red_line:g} is not between 0 and 1", hint="0.95 is a good one")
    if fraction is not None and not 0 < fraction <= 1:
        raise PlanInputError(f"a memory fraction of {fraction:g} is not between 0 and 1", hint="0.90 is a good start")
    limits = (
        ("prefill chunk", inputs.prefill_chunk_tokens, CHUNK_MIN_TOKENS, 1 << 20),
        ("number of sequences", inputs.max_running, 1, 1 << 16),
        ("number of state slots", inputs.state_slots, 1, 1 << 20),
        ("number of drafted tokens", inputs.draft_tokens, 0, 64),
        ("context", inputs.context_length_tokens, 1, None),
        ("smallest context", inputs.min_context_tokens, 0, None),
        ("tensor parallel size", inputs.tensor_parallel, 1, 1024),
        ("block", inputs.block_tokens, 1, 1 << 16),
    )
    for what, value, least, most in limits:
        if value is not None and value < least:
            raise PlanInputError(f"a {what} of {value} is less than {least}", hint=f"{least} is the smallest")
        if value is not None and most is not None and value > most:
            raise PlanInputError(f"a {what} of {value:,} is more than any engine takes", hint=f"{most:,} is the largest")
    _sizes(inputs)
    if inputs.state_slots is not None and inputs.max_running and inputs.state_slots < inputs.max_running:
        found = f"{inputs.state_slots} state slots hold less than the {inputs.max_running} sequences"
        raise PlanInputError(found, hint="each sequence needs a slot of its own, three with the prefix cache")
    free = inputs.measured.free_at_start_bytes
    if free is not None and free > 2 * inputs.gpu.total_bytes:
        raise PlanInputError(f"{gib(free)} of free memory are more than the card has", hint=f"it shows {gib(inputs.gpu.total_bytes)}")


def _sizes(inputs: PlanInputs) -> None:
    """Measured terms and the card: a typing error of three digits is not planned with."""
    if inputs.gpu.total_bytes > MEMORY_MAX_BYTES:
        raise PlanInputError(f"{gib(inputs.gpu.total_bytes)} are more than any card or machine has", hint=f"{_MOST} are the most")
    for term in dataclasses.fields(inputs.measured):
        size = getattr(inputs.measured, term.name)
        if isinstance(size, int) and size > MEMORY_MAX_BYTES:
            what = term.name.removesuffix("_bytes").replace("_", " ")
            raise PlanInputError(f"{gib(size)} as the measured {what} are more than any card or machine has", hint=f"{_MOST} are the most")
    for what, size in (("headroom that was not enough", inputs.oom_headroom_bytes),):
        if size > inputs.gpu.total_bytes:
            raise PlanInputError(f"{gib(size)} of {what} are more than the card has", hint=f"it shows {gib(inputs.gpu.total_bytes)}")


def _state_dtype(inputs: PlanInputs) -> None:
    word = inputs.state_dtype
    if word is None:
        return
    known = _STATE_WORDS.get(inputs.engine, ())
    if not inputs.model.linear:
        raise PlanInputError(f"a linear state in {word!r} was asked for, and the model has no linear layers", hint="leave --ssm-dtype out")
    if word not in known:
        words = f"one of {', '.join(known)}" if known else "leave --ssm-dtype out: it is float32"
        raise PlanInputError(f"{inputs.engine} keeps no linear state in {word!r}", hint=words)


def _version(inputs: PlanInputs) -> None:
    if inputs.engine_version and not _VERSION.fullmatch(inputs.engine_version):
        found = f"engine version {inputs.engine_version[:60]!r} is no version of {inputs.engine}"
        raise PlanInputError(found, hint="write it as the engine prints it, such as 0.5.17 (llama.cpp: b11434), or leave it out")


def _context(inputs: PlanInputs) -> None:
    limit = as_served(inputs).model.max_context_tokens
    for what, value in (("context", inputs.context_length_tokens), ("smallest context", inputs.min_context_tokens)):
        if value is not None and value > limit:
            raise PlanInputError(
                f"a {what} of {value:,} tokens exceeds the model's own limit of {limit:,}", hint=f"ask for {limit} or less"
            )


def _kv_dtype(inputs: PlanInputs) -> None:
    if inputs.kv_dtype in ("auto", ""):
        return
    bits_of(inputs.kv_dtype)
    word, engine = inputs.kv_dtype.lower(), inputs.engine
    if word in _GGML_WORDS - {"f32", "f16", "bf16"} and engine != "llamacpp":
        raise PlanInputError(f"{engine} has no KV cache in {word}", hint="that is llama.cpp's word; fp8_e4m3 is the nearest")
    if word in _VLLM_ONLY and engine != "vllm":
        raise PlanInputError(f"{engine} has no KV cache in {word}", hint="that is vLLM's word; fp8_e4m3 is the nearest")
    if engine == "native" and word not in ("float32", "fp32", "f32"):
        raise PlanInputError(f"the built-in engine has no KV cache in {word}", hint="leave --kv-dtype out: it is float32")


def _tensor_parallel(inputs: PlanInputs) -> None:
    tp, model = inputs.tensor_parallel, inputs.model
    if tp == 1 or inputs.engine == "llamacpp":  # llama.cpp shares out layers, not heads
        return
    if inputs.engine == "native":
        raise PlanInputError(f"the built-in engine does not run on {tp} cards", hint="leave --tp out")
    heads = model.attention_heads
    if heads and heads % tp:
        raise PlanInputError(f"{heads} attention heads cannot be shared by {tp} cards", hint=f"take one of {divisors(heads)}")
    if model.linear and model.linear.value_heads % tp:
        found = f"{model.linear.value_heads} linear-attention heads cannot be shared by {tp} cards"
        raise PlanInputError(found, hint=f"take one of {divisors(model.linear.value_heads)}")


def divisors(heads: int) -> str:
    """Card counts that share so many heads evenly."""
    return ", ".join(str(count) for count in range(1, 17) if heads % count == 0)
