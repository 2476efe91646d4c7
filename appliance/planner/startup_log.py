"""An engine's own start-up log → measured terms. Pure: text in, figures with their lines out."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace

from appliance.planner.inputs import Measured, PlanInputs
from appliance.planner.log_patterns import ENGINE_MARKS, KV_DTYPES, LLAMACPP, NATIVE, SGLANG, SUMMED, VERSIONS, VLLM, LinePattern

_PATTERNS = {"sglang": SGLANG, "vllm": VLLM, "llamacpp": LLAMACPP, "native": NATIVE}
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_RANK = re.compile(r"\b(?:TP|Worker_TP)(\d+)\b|\bgpu(?:_id)?=(\d+)\]")
_DEVICE = re.compile(r"\b(?:CUDA|ROCm|Vulkan)(\d+) ")
_SAME_DTYPE = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2", "float8_e4m3": "fp8_e4m3"}


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure: bytes or a count, and the last line that it stands in."""

    value: float
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class StartupLog:
    """What a log says of one rank (the first).

    Attributes:
        engine: "sglang", "vllm", "llamacpp", "native" or "" when no line was known.
        version: as printed, or empty.
        kv_dtype: as printed, in the words of --kv-dtype, or empty.
        figures: by the names of log_patterns.
    """

    engine: str
    version: str = ""
    kv_dtype: str = ""
    figures: dict[str, Figure] = field(default_factory=dict)

    def size(self, name: str) -> int | None:
        """A figure as whole bytes (or count)."""
        figure = self.figures.get(name)
        return None if figure is None else round(figure.value)

    def fraction(self) -> float | None:
        """The memory fraction that the engine ran with."""
        figure = self.figures.get("mem_fraction")
        return figure.value if figure is not None and 0 < figure.value <= 1 else None

    def lines(self) -> str:
        """ "lines 12 to 48 of the log"."""
        numbers = sorted(figure.line for figure in self.figures.values())
        return f"lines {numbers[0]} to {numbers[-1]} of the log" if numbers else "the log"


def read_startup_log(text: str) -> StartupLog:
    """The figures of a log, whichever of the engines wrote it."""
    lines = [_COLOUR.sub("", line) for line in text.splitlines()]
    engine = _engine_of(lines)
    if not engine:
        return StartupLog("")
    figures: dict[str, Figure] = {}
    first_rank: str | None = None
    for number, line in enumerate(lines, start=1):
        rank = _rank_of(line, engine)
        for pattern in _PATTERNS[engine]:
            match = pattern.pattern.search(line)
            if match is None:
                continue
            first_rank = rank if first_rank is None and rank else first_rank
            if rank in ("", first_rank):
                _note(figures, engine, pattern, float(match[1].replace(",", "")), number, line.strip())
    return StartupLog(engine, _first(VERSIONS.get(engine), lines), _kv_dtype(engine, lines), figures)


def _engine_of(lines: list[str]) -> str:
    counts = Counter(engine for line in lines for engine, mark in ENGINE_MARKS if mark.search(line))
    return counts.most_common(1)[0][0] if counts else ""


def _rank_of(line: str, engine: str) -> str:
    """The rank or device of a line, as text; empty where there is one only."""
    match = (_DEVICE if engine == "llamacpp" else _RANK).search(line)
    return "" if match is None else next(group for group in match.groups() if group is not None)


def _note(figures: dict[str, Figure], engine: str, pattern: LinePattern, number: float, line: int, text: str) -> None:
    value = number * pattern.scale
    before = figures.get(pattern.name)
    if before is not None and before.line != line:
        if f"{engine}.{pattern.name}" in SUMMED:
            value += before.value
        elif pattern.name == "free_at_start" and engine == "sglang":
            return  # the drafter's load begins with less
    figures[pattern.name] = Figure(value, line, text)


def _first(pattern: re.Pattern[str] | None, lines: list[str]) -> str:
    return "" if pattern is None else next((match[1] for match in map(pattern.search, lines) if match is not None), "")


def _kv_dtype(engine: str, lines: list[str]) -> str:
    word = _first(KV_DTYPES.get(engine), lines)
    return _SAME_DTYPE.get(word, word)


def measured_terms(log: StartupLog) -> Measured:
    """The log's figures as the planner's terms."""
    reader = {"sglang": _sglang, "vllm": _vllm, "llamacpp": _llamacpp, "native": _native}.get(log.engine)
    return Measured() if reader is None else replace(reader(log), source=log.lines())


def _sglang(log: StartupLog) -> Measured:
    free, after = log.size("free_at_start"), log.size("after_weights")
    weights = log.size("weights")
    if weights is None and free is not None and after is not None:
        weights = free - after  # before 0.4.4 only what was left was printed
    parts = [log.size(name) for name in ("ssm_state", "conv_state", "intermediate_ssm", "intermediate_conv")]
    state = sum(part for part in parts if part is not None) if parts[0] is not None else None
    pools, left = log.size("after_pools"), log.size("available")
    fixed = pools - left if pools is not None and left is not None and pools >= left else None
    sizes = [log.size(name) for name in ("k_cache", "v_cache", "kv_cache")]
    caches = [size for size in sizes if size is not None]
    pool = log.size("sliding_cache") or (sum(caches) if caches else None)
    return Measured(free, weights, state, fixed, None, pool)


def _vllm(log: StartupLog) -> Measured:
    weights, consumed, other = log.size("weights"), log.size("consumed"), log.size("non_torch")
    if other is None and consumed is not None and weights is not None:
        other = max(0, consumed - weights)
    peak, torch_peak = log.size("activation"), log.size("peak_torch")
    if peak is None and torch_peak is not None and weights is not None:
        peak = max(0, torch_peak - weights)
    return Measured(
        log.size("free_at_start"), weights, None, log.size("graphs"), peak, log.size("kv_pool"), other,
    )  # fmt: skip


def _llamacpp(log: StartupLog) -> Measured:
    """Of a card, or of the machine where no card has a part of the model."""
    if log.size("weights") is None and log.size("kv_pool") is None:
        return Measured(None, log.size("host_weights"), log.size("host_state"), None, log.size("host_compute"), log.size("host_kv_pool"))
    return Measured(None, log.size("weights"), log.size("linear_state"), None, log.size("compute"), log.size("kv_pool"))


def _native(log: StartupLog) -> Measured:
    return Measured(weight_bytes=log.size("weights"), kv_pool_bytes=log.size("kv_pool"))


def as_started(inputs: PlanInputs, log: StartupLog) -> PlanInputs:
    """The inputs that the log describes: its setting and its measured terms, where they are printed."""

    def count(name: str, otherwise: int | None) -> int | None:
        value = log.size(name)
        return value if value else otherwise

    context = count("context", inputs.context_length_tokens)
    total, free = log.size("total"), log.size("free_before")
    gpu = replace(inputs.gpu, total_bytes=total or inputs.gpu.total_bytes, free_at_start_bytes=free or inputs.gpu.free_at_start_bytes)
    return replace(
        inputs,
        gpu=gpu,
        engine=log.engine or inputs.engine,
        engine_version=inputs.engine_version or log.version,
        mem_fraction=inputs.mem_fraction if inputs.mem_fraction is not None else log.fraction(),
        context_length_tokens=min(context, inputs.model.max_context_tokens) if context else None,
        kv_dtype=log.kv_dtype if inputs.kv_dtype == "auto" and log.kv_dtype else inputs.kv_dtype,
        tensor_parallel=count("tensor_parallel", None) or inputs.tensor_parallel,
        prefill_chunk_tokens=inputs.prefill_chunk_tokens or count("chunk", None),
        max_running=inputs.max_running or count("max_running", None),
        draft_tokens=inputs.draft_tokens or count("draft_tokens", 0) or 0,
        state_slots=inputs.state_slots or count("state_slots", None),
        measured=_merged(inputs.measured, measured_terms(log)),
    )


def _merged(given: Measured, read: Measured) -> Measured:
    """What a person gave wins over what the log says."""
    names = (
        "free_at_start_bytes", "weight_bytes", "linear_state_bytes", "fixed_bytes", "activation_peak_bytes", "kv_pool_bytes",
        "non_torch_bytes",
    )  # fmt: skip
    given_terms = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
    return replace(read, **given_terms)
