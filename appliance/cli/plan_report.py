"""How a plan looks: the bar, the chain and the table for people, one document for programs."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click

from appliance import flags
from appliance.cli.printing import WIDTH, bad, bold, faint, good, say, say_json, table, uncertain, wrapped
from appliance.control.codec import rung_to_json
from appliance.core.causes import Cause
from appliance.core.plan import MemoryPlan, Rung
from appliance.core.units import format_bytes
from appliance.core.versions import version_of
from appliance.flags import EngineWords
from appliance.planner.draw import bar
from appliance.planner.inputs import Choice, PlanInputs, PlanRefused, TableRow

Result = Choice | PlanRefused
_COLOURS = {"█": "blue", "▒": "green", "▓": "magenta", "▤": "red", "▞": "yellow", "▚": "yellow"}


def plan_of(result: Result) -> MemoryPlan:
    """The chain, of a refusal too."""
    return result.plan if isinstance(result, Choice) else result.shortfall.plan


def _rows(result: Result) -> tuple[TableRow, ...]:
    return result.table if isinstance(result, Choice) else result.shortfall.table


def engine_words(result: Result) -> EngineWords:
    """What the engine is told; nothing for a plan that cannot run."""
    if not isinstance(result, Choice):
        return EngineWords(())
    rules = flags.rules_of(result.inputs.engine)
    return rules.words(result.rung, version_of(result.inputs.engine_version, rules.newest))


def command_line(choice: Choice) -> str:
    """The engine's command line, without the model's path, which the plan does not know."""
    words = engine_words(choice)
    variables = [f"{name}={value}" for name, value in words.environment.items()]
    return shlex.join((*variables, *flags.rules_of(choice.inputs.engine).program, *words.arguments))


def print_json(result: Result, compared: tuple[Any, ...] = (), rungs: tuple[Rung, ...] | None = None) -> None:
    """The keys of docs/budget.md."""
    answer = document(result, compared)
    say_json(answer if rungs is None else {**answer, "ladder": [rung_to_json(rung) for rung in rungs]})


def document(result: Result, compared: tuple[Any, ...] = ()) -> dict[str, Any]:
    """What --json prints."""
    plan = plan_of(result)
    answer: dict[str, Any] = {
        "mem_fraction": plan.mem_fraction,
        "kv_tokens": plan.kv_tokens,
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "headroom_bytes": max(0, plan.headroom_bytes),
        "context_length": plan.context_length_tokens,
        "fits": isinstance(result, Choice),
        "terms": [{"name": t.name, "bytes": max(0, t.size_bytes), "formula": t.formula, "source": t.source} for t in plan.terms],
        "table": [_row(row) for row in _rows(result)],
        "choice": _choice(result),
        "ways_out": [
            {"change": way.change, "gain": way.gain, "options": list(way.options), "context_length": way.plan.context_length_tokens}
            for way in (result.ways_out if isinstance(result, PlanRefused) else ())
        ],
        "flags": list(engine_words(result).arguments),
    }
    if compared:
        answer["measured"] = [_compared(row) for row in compared]
    return answer


def _compared(row: Any) -> dict[str, Any]:
    return {"name": row.name, "planned": row.planned, "measured": row.measured, "unit": row.unit, "off": round(row.off, 5)}


def _row(row: TableRow) -> dict[str, Any]:
    return {
        "mem_fraction": row.mem_fraction,
        "kv_tokens": row.kv_tokens,
        "headroom_bytes": max(0, row.headroom_bytes),
        "context_length": row.context_length_tokens,
        "fits": row.fits,
    }


def _choice(result: Result) -> dict[str, Any]:
    inputs, plan = result.inputs, plan_of(result)
    return {
        "engine": inputs.engine,
        "mem_fraction": plan.mem_fraction,
        "context_length": plan.context_length_tokens,
        "kv_tokens": plan.kv_tokens,
        "headroom_bytes": max(0, plan.headroom_bytes),
        "activation_peak_bytes": plan.activation_peak_bytes,
        "max_running": inputs.max_running,
        "prefill_chunk": inputs.prefill_chunk_tokens,
        "kv_dtype": inputs.kv_dtype,
        "tensor_parallel": inputs.tensor_parallel,
        "engines": inputs.engines,
        "all_engines": _all_engines(inputs, plan),
        "environment": dict(engine_words(result).environment),
        "reason": result.reason if isinstance(result, Choice) else result.message,
        "warnings": list(result.warnings) if isinstance(result, Choice) else [],
        "assumptions": list(inputs.assumptions),
    }


def _all_engines(inputs: PlanInputs, plan: MemoryPlan) -> dict[str, Any]:
    """What they have together."""
    running = None if inputs.max_running is None else inputs.engines * inputs.max_running
    return {"max_running": running, "kv_tokens": inputs.engines * plan.kv_tokens}


def _together(inputs: PlanInputs, plan: MemoryPlan) -> str:
    running = f"{inputs.engines} × {inputs.running} = {inputs.engines * inputs.running:,} sequences at once"
    return (
        f"one engine on each of {inputs.engines} cards: together {running} and {inputs.engines * plan.kv_tokens:,} tokens of KV cache; "
        f"a request has the context and the KV cache of one"
    )


def print_words(result: Result, *, explain: bool = False, compared: tuple[Any, ...] = ()) -> None:
    """For people."""
    inputs, plan = result.inputs, plan_of(result)
    mark = good("fits") if isinstance(result, Choice) else bad("does not fit")
    version = f" {inputs.engine_version}" if inputs.engine_version else ""
    card = (f"{inputs.tensor_parallel} × " if inputs.tensor_parallel > 1 else "") + inputs.gpu.name
    seen = format_bytes(inputs.gpu.total_bytes)
    say(f"{mark} {bold(inputs.model.name)} on {card} ({seen} seen), {inputs.engine}{version}")
    _print_bar(plan, inputs)
    if explain:
        for sentence in plan.explain():
            _print_wrapped(sentence)
    else:
        _print_chain(plan)
    say()
    if isinstance(result, Choice):
        _print_wrapped(result.reason)
        if inputs.engines > 1:
            _print_wrapped(_together(inputs, plan))
        for warning in result.warnings:
            _print_wrapped(f"{uncertain('note')} {warning}")
    else:
        _print_refusal(result)
    if inputs.assumptions:
        _print_wrapped(faint("assumed: " + "; ".join(inputs.assumptions)))
    _print_table(result)
    _print_compared(compared)


def _print_bar(plan: MemoryPlan, inputs: PlanInputs) -> None:
    pieces, legend = bar(plan, inputs.gpu.total_bytes, WIDTH - 4)
    say("  " + "".join(click.style(piece, fg=_COLOURS.get(piece[:1])) for piece in pieces))
    for line in wrapped(legend, WIDTH - 4):
        say("  " + line)
    say()


def _print_chain(plan: MemoryPlan) -> None:
    wide = max(len(term.name) for term in plan.terms)
    for term in plan.terms:
        say(f"  {term.name.ljust(wide)}  {format_bytes(term.size_bytes):>12}  {faint(term.formula)}")
    say(f"  {'KV tokens'.ljust(wide)}  {plan.kv_tokens:>12,}  {faint(f'{plan.kv_bytes_per_token:,} bytes each')}")


def _print_refusal(refused: PlanRefused) -> None:
    _print_wrapped(refused.message)
    if refused.ways_out:
        say("What would make it run:")
    for way in refused.ways_out:
        _print_wrapped(f"- {way.change}: {way.gain}  {faint(shlex.join(way.options))}")


def print_rungs(cause: Cause, rungs: tuple[Rung, ...]) -> None:
    """What each gives up and gains."""
    say()
    if not rungs:
        _print_wrapped(f"After {cause.label} no other setting helps: the engine is started again as it was, or parked.")
        return
    say(f"After {cause.label}, one after the other:")
    for rung in rungs:
        setting = f"fraction {rung.mem_fraction:.4g}, context {rung.context_length_tokens:,}"
        _print_wrapped(f"{bold(str(rung.index))}  {rung.gives_up}; gains {rung.gains}  {faint(f'({setting})')}")


def _print_table(result: Result) -> None:
    chosen = plan_of(result).mem_fraction
    say()
    rows = [
        (
            ("→ " if row.mem_fraction == chosen else "  ") + f"{row.mem_fraction:.4g}",
            f"{row.kv_tokens:>10,}",
            f"{format_bytes(row.headroom_bytes):>11}",
            f"{row.context_length_tokens:>9,}",
            good("fits") if row.fits else faint("no"),
        )
        for row in _rows(result)
    ]
    table(("  fraction", " KV tokens", "   headroom", "  context", ""), rows)


def _print_compared(compared: tuple[Any, ...]) -> None:
    if not compared:
        return
    say()
    rows = [(row.name, _amount(row.planned, row.unit), _amount(row.measured, row.unit), f"{row.off:+.1%}") for row in compared]
    table(("term", "planned", "measured", "off"), rows)


def _amount(value: int, unit: str) -> str:
    return f"{value:,}" if unit == "tokens" else format_bytes(value)


def _print_wrapped(text: str) -> None:
    for line in wrapped(text):
        say(line)


def write_svg(result: Result, file: Path) -> None:
    """Draw the chain. Raises click.FileError."""
    from appliance.planner.draw_svg import svg

    title = f"{result.inputs.model.name} on {result.inputs.gpu.name}, {result.inputs.engine}, fraction {plan_of(result).mem_fraction:.4g}"
    try:
        file.write_text(svg(plan_of(result), result.inputs.gpu.total_bytes, title), encoding="utf-8")
    except OSError as error:
        raise click.FileError(str(file), error.strerror or str(error)) from error
