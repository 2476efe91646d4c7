"""`appliancectl plan --from-log`: measured terms, planned against measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from appliance.cli.plan import plan_and_print
from appliance.cli.printing import bold, faint, say, say_json, table
from appliance.core.errors import ApplianceError, ExitCode
from appliance.core.units import format_bytes
from appliance.planner.compare import compare
from appliance.planner.inputs import PlanInputs
from appliance.planner.log_patterns import LLAMACPP, SGLANG, VLLM
from appliance.planner.startup_log import StartupLog, as_started, read_startup_log

_COUNTS = {pattern.name for pattern in (*SGLANG, *VLLM, *LLAMACPP) if pattern.scale == 1}


def plan_from_log(text: str, inputs: PlanInputs | None, given: Mapping[str, Any]) -> ExitCode:
    """Print the log's terms; with a model, the plan of that start on these terms and what a plan without them would have said.

    Raises:
        ApplianceError: no line of a known engine.
    """
    log = read_startup_log(text)
    if not log.figures:
        raise ApplianceError(
            f"{given['log_file']} holds no memory line of SGLang, vLLM, llama.cpp or the built-in engine",
            hint="the lines of the engine's start are needed, at INFO level",
        )
    if inputs is None:
        _print_terms(log, as_json=given["as_json"])
        return ExitCode.OK
    return plan_and_print(as_started(inputs, log), given, compare(inputs, log))


def _print_terms(log: StartupLog, *, as_json: bool) -> None:
    figures = {name: _plain(name, figure.value) for name, figure in log.figures.items()}
    if as_json:
        lines = {name: {"value": figures[name], "line": figure.line, "text": figure.text} for name, figure in log.figures.items()}
        say_json({"engine": log.engine, "version": log.version, "kv_dtype": log.kv_dtype, "figures": lines})
        return
    say(f"{bold(log.engine)} {log.version}".rstrip())
    rows = [(name, _words(name, figure.value), faint(f"line {figure.line}: {figure.text[:100]}")) for name, figure in log.figures.items()]
    table(("term", "measured", "from"), rows)
    say(faint("with --model, planned against measured is shown"))


def _plain(name: str, value: float) -> float | int:
    return value if name in ("mem_fraction", "concurrency") else round(value)


def _words(name: str, value: float) -> str:
    return f"{_plain(name, value):,}" if name in _COUNTS else format_bytes(round(value))
