"""`appliancectl plan`: the VRAM budget, offline. The arithmetic is appliance.planner's."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from appliance.cli.place import Place
from appliance.cli.plan_cards import LAYOUTS, cards_for
from appliance.cli.plan_facts import AUTO, find_model_path, read_model
from appliance.cli.verbs import Verb
from appliance.core.causes import Cause
from appliance.core.errors import ApplianceError, ExitCode
from appliance.core.units import KIB, parse_bytes
from appliance.planner.between_cards import WORDS
from appliance.planner.choose import LOWEST
from appliance.planner.engines import ENGINES, engine_name
from appliance.planner.features import FEATURES
from appliance.planner.inputs import Choice, Measured, PlanInputError, PlanInputs, PlanRefused

if TYPE_CHECKING:  # most plans are about other boxes
    from appliance.core.plan import Rung
    from appliance.planner.calibration import Calibration


def _size(_context: click.Context, _parameter: click.Parameter, value: str | None) -> int | None:
    """17.67GiB, 512MiB; auto is as if it had not been given."""
    if value in (None, AUTO):
        return None
    try:
        return parse_bytes(str(value))
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def _tokens(_context: click.Context, _parameter: click.Parameter, value: str | None) -> int | None:
    """102400, 102,400, 100k (of 1024); or auto."""
    if value is None or value == AUTO:
        return None
    digits, scale = (value[:-1], KIB) if value[-1:].lower() == "k" else (value, 1)
    digits = digits.replace(",", "").replace("_", "")
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= _DIGITS_MAX):
        raise click.BadParameter(f"{shortened(value)} is no number of tokens: write 102400 or 100k")
    return int(digits) * scale


def _fraction(_context: click.Context, _parameter: click.Parameter, value: str | None) -> float | None:
    """0.93; or auto."""
    if value is None or value == AUTO:
        return None
    share = _FRACTION.fullmatch(value)
    if share is None or not 0 < float(value) <= 1:
        raise click.BadParameter(f"{shortened(value)} is no fraction of the memory: write a number above 0, 1 at most, such as 0.93")
    return float(value)


def _red_line(context: click.Context, parameter: click.Parameter, value: str) -> float:
    """A fraction that leaves something to choose from."""
    share = _fraction(context, parameter, value) if _FRACTION.fullmatch(value) and float(value) <= 1 else None
    if share is None or share < LOWEST:
        raise click.BadParameter(f"{shortened(value)} leaves no fraction to choose: write a number from {LOWEST:g} to 1, such as 0.95")
    return share


def _whole(_context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """A count; what it may be is the planner's to say. auto is as if it had not been given."""
    if value is None or value == AUTO:
        return None
    if not re.fullmatch(r"-?[0-9]{1,18}", value):
        raise click.BadParameter(f"{shortened(value)} is no whole number: write for example {parameter.metavar}")
    return int(value)


def _cause(_context: click.Context, _parameter: click.Parameter, value: str | None) -> Cause | None:
    """A label of docs/failures.md."""
    try:
        return None if value is None else Cause.of(value)
    except KeyError:
        hint = "write a label of failures.md in the documentation, such as cuda_oom_prefill"
        raise click.BadParameter(f"{shortened(value or '')} is no cause: {hint}") from None


_DIGITS_MAX = 15
_FRACTION = re.compile(r"[0-9]*\.?[0-9]+|[0-9]+\.")


def shortened(value: str) -> str:
    """For a message: what was typed, not all of it where it is endless."""
    return repr(value if len(value) <= 60 else value[:57] + "...")


@click.command(cls=Verb)
@click.option("--model", "model_name", metavar="DIR|config.json|NAME", help="A model folder, a config.json, a .gguf file, or a known name.")
@click.option("--gpu", "gpu_name", default=AUTO, metavar="CARD", help="24GiB, rtx3090, a100-80g, ... [default: the first card here].")
@click.option("--engine", "engine", metavar="|".join(ENGINES), help="Whose arithmetic [default: sglang, llamacpp for a GGUF file].")
@click.option("--engine-version", default="", help="Such as 0.5.17 [default: the newest rules we know].")
@click.option("--mem-fraction", callback=_fraction, help="Work this one out instead of choosing.")
@click.option("--context", "context_length_tokens", callback=_tokens, help="This much context is wanted [default: as much as fits].")
@click.option("--min-context", "min_context_tokens", callback=_tokens, help="Refuse less than this much context.")
@click.option("--kv-dtype", default=AUTO, help="Of the KV cache: fp8_e4m3, q8_0, ... [default: the model's dtype].")
@click.option("--tp", "tensor_parallel", callback=_whole, metavar="2", help="Cards that share the model [default: 1, or as --layout says].")
@click.option("--gpus", callback=_whole, metavar="2", help="So many of such cards [default: those that are here, 1 of a named one].")
@click.option(
    "--layout", type=click.Choice(LAYOUTS), help="How they are shared out [default: this box's gpu.layout, for its cards or with --gpus]."
)
@click.option("--p2p", type=click.Choice(WORDS), help="Whether cards read each other's memory [default: gpu.p2p, found likewise].")
@click.option("--max-running", callback=_whole, metavar="8", help="Sequences decoded together.")
@click.option(
    "--chunk", "prefill_chunk_tokens", callback=_whole, metavar="2048", help="Tokens of one prefill step (llama.cpp: --ubatch-size)."
)
@click.option("--draft-tokens", callback=_whole, default="0", metavar="3", help="Drafted tokens of speculative decoding; 0: none.")
@click.option("--ssm-dtype", "state_dtype", help="Of the linear layers' state: float32, bfloat16.")
@click.option("--state-slots", callback=_whole, metavar="9", help="State slots of SGLang (--max-mamba-cache-size).")
@click.option("--block-tokens", callback=_whole, metavar="16", help="Tokens of one KV block (vLLM: --block-size, SGLang: --page-size).")
@click.option("--no-prefix-cache", is_flag=True, help="Prompts do not share their prefixes.")
@click.option("--language-only", is_flag=True, help="Leave a vision tower unloaded.")
@click.option("--off", "features_off", multiple=True, metavar="FEATURE", help="Switched off, such as cuda_graph. May be given again.")
@click.option("--weights", "weight_bytes", callback=_size, help="Measured: weights of one card.")
@click.option("--linear-state", "linear_state_bytes", callback=_size, help="Measured: linear state of all slots.")
@click.option("--free", "free_at_start_bytes", callback=_size, help="Measured: free when the engine starts, its CUDA context taken.")
@click.option("--kv-pool", "kv_pool_bytes", callback=_size, help="Measured: bytes of the KV pool (vLLM: Available KV cache memory).")
@click.option("--activation", "activation_peak_bytes", callback=_size, help="Measured: the prefill peak.")
@click.option("--graphs", "fixed_bytes", callback=_size, help="Measured: workspaces and CUDA graphs.")
@click.option("--oom-headroom", "oom_headroom_bytes", callback=_size, help="History: it ran out of memory with this much headroom.")
@click.option("--unmeasured", is_flag=True, help="Leave out what starts and proof runs on this box measured.")
@click.option("--red-line", callback=_red_line, default="0.95", show_default=True, help="The highest fraction that is chosen.")
@click.option("--from-log", "log_file", metavar="FILE", help="Read the terms out of an engine's start-up log; - for stdin.")
@click.option("--after", "after", callback=_cause, metavar="CAUSE", help="And the rungs below, should the engine be lost to this cause.")
@click.option("--json", "as_json", is_flag=True, help="Print data for programs.")
@click.option("--explain", is_flag=True, help="A sentence a term.")
@click.option("--flags", "as_flags", is_flag=True, help="Print the engine's command line alone.")
@click.option("--svg", "svg_file", type=click.Path(path_type=Path), help="Draw the chain into this file.")
@click.pass_obj
def plan(place: Place, /, **given: Any) -> ExitCode:
    """How much context fits a card, and why.

    Works offline. Without --model it is about what this box serves; for its own models what their starts measured is used. Any
    measured term may be given. Exit code 0 when it fits, 1 when it does not, 2 for usage.

    \b
    Examples:
      appliancectl plan --model ~/models/Qwen3.8-27B --gpu rtx3090 --kv-dtype fp8_e4m3
      appliancectl plan --model config.json --gpu 24GiB --weights 17.67GiB --mem-fraction 0.95
      appliancectl plan --model qwen3-14b --gpu rtx3090 --tp 2 --engine vllm --json
      appliancectl plan --model qwen3-14b --gpu rtx3090 --gpus 2 --layout replicas
      appliancectl plan --model qwen3-14b --gpu rtx3090 --after cuda_oom_prefill
      appliancectl plan --from-log engine.log --model config.json
    """
    if given["log_file"]:
        from appliance.cli.plan_log import plan_from_log

        return plan_from_log(_read_log(given["log_file"]), _inputs(place, given) if given["model_name"] else None, given)
    return plan_and_print(_inputs(place, given), given)


def plan_and_print(inputs: PlanInputs, given: Mapping[str, Any], compared: tuple[Any, ...] = ()) -> ExitCode:
    """Plan, and show it as it was asked for."""
    from appliance.cli import plan_report
    from appliance.planner.ways_out import plan as planned

    try:
        result: Any = planned(inputs)
    except PlanRefused as refused:
        result = refused
    if given["svg_file"]:
        plan_report.write_svg(result, given["svg_file"])
    rungs = _rungs_below(result, given["after"]) if given["after"] is not None and isinstance(result, Choice) else None
    if given["as_json"]:
        plan_report.print_json(result, compared, rungs)
    elif given["as_flags"] and not isinstance(result, PlanRefused):
        click.echo(plan_report.command_line(result))
    else:
        plan_report.print_words(result, explain=given["explain"], compared=compared)
        if rungs is not None:
            plan_report.print_rungs(given["after"], rungs)
    return ExitCode.BAD if isinstance(result, PlanRefused) else ExitCode.OK


def _rungs_below(choice: Choice, cause: Cause) -> tuple[Rung, ...]:
    """What the supervisor would be offered."""
    from appliance.planner.ladder import ladder

    return ladder(choice.inputs, cause, failed=choice.rung)


def _inputs(place: Place, given: Mapping[str, Any]) -> PlanInputs:
    """The command line as PlanInputs."""
    known = _known(place, given)
    path = find_model_path(place, given["model_name"] or _own_model(place, known))
    if known:
        from appliance.cli.plan_measured import of_model

        known = of_model(known, path)
    model = read_model(path)
    default = "llamacpp" if model.weights_from.startswith("GGUF") else "sglang"
    engine = engine_name(given["engine"] or (known[0].engine if known else default))
    here = ", which serves it here" if known else ""
    assumed = () if given["engine"] else (f"the arithmetic of {engine}{here} (--engine)",)
    measured = Measured(**{name: given[name] for name in _MEASURED})
    same = {name: given[name] for name in _SAME_NAMES}
    cards = cards_for(place, given, engine)
    inputs = PlanInputs(
        model,
        cards.gpu,
        engine,
        tensor_parallel=cards.tensor_parallel,
        engines=cards.engines,
        draft_tokens=given["draft_tokens"] or 0,
        min_context_tokens=given["min_context_tokens"] or 0,
        prefix_cache=not given["no_prefix_cache"],
        features_off=_features(given["features_off"]) | cards.off,
        oom_headroom_bytes=given["oom_headroom_bytes"] or 0,
        measured=measured,
        assumptions=(*assumed, *cards.assumptions),
        **same,
    )
    if not known:
        return inputs
    from appliance.cli.plan_measured import with_measured

    return with_measured(inputs, known)


def _known(place: Place, given: Mapping[str, Any]) -> tuple[Calibration, ...]:
    """What was measured here; it holds for the card that is here."""
    if given["gpu_name"] != AUTO or given["unmeasured"]:
        return ()
    from appliance.cli.plan_measured import known_here

    return known_here(place)


def _own_model(place: Place, known: tuple[Calibration, ...]) -> str:
    """What this box serves, or has served last."""
    named = known[0].model_path if known else ""
    named = named or (place.load().config.model.path if place.config_file() is not None else "")
    if not named:
        raise click.UsageError("--model or --from-log is needed: nothing was served on this box yet")
    return named


_MEASURED = ("weight_bytes", "linear_state_bytes", "free_at_start_bytes", "kv_pool_bytes", "activation_peak_bytes", "fixed_bytes")
_SAME_NAMES = (
    "engine_version", "mem_fraction", "context_length_tokens", "kv_dtype", "max_running", "prefill_chunk_tokens", "state_dtype",
    "state_slots", "block_tokens", "language_only", "red_line",
)  # fmt: skip


def _features(names: tuple[str, ...]) -> frozenset[str]:
    for name in names:
        if name not in FEATURES:
            raise PlanInputError(f"{name!r} is no feature that can be switched off", hint=f"one of {', '.join(FEATURES)}")
    return frozenset(names)


def _read_log(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ApplianceError(
            f"the log {file} cannot be read: {error.strerror}", hint="name a file that is there, or - for stdin"
        ) from error
