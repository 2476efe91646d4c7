"""`appliancectl stress`: the built-in engine, worked in every shape for a while, and judged."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import click

from appliance.cli.config import set_option
from appliance.cli.models import MODELS, model_folder
from appliance.cli.place import Place, serving_state_dir
from appliance.cli.printing import fields, say, say_json
from appliance.cli.quantities import FiniteRange
from appliance.cli.verbs import Verb
from appliance.core.errors import ApplianceError, ExitCode

HOUR_S = 3600.0


@click.command(cls=Verb)
@click.option("--hours", type=FiniteRange(0.0, 24 * 365), default=1.0, show_default=True, help="How long; a new kernel wants 72.")
@click.option("--seed", type=int, default=1, show_default=True, help="The same seed, the same requests.")
@set_option
@click.option("--json", "as_json", is_flag=True, help="Print data for programs.")
@click.pass_obj
def stress(place: Place, hours: float, seed: int, assignments: tuple[str, ...], as_json: bool) -> ExitCode:
    """Work the built-in engine hard for a while, and judge it.

    Random requests in a KV cache that is too small for them: lengths, shared beginnings, sampling, clients that leave. After every
    round the blocks must add up, nothing may be written where nobody writes, the counters of refused accesses must be zero, and
    answers must be the same by themselves as among others. At the end the process must not have grown.

    It is an engine of its own beside the one that serves, with the configured model (else the demo model), threads and weights: about
    300 MiB and the weights. Exit code 1 when something was found.

    \b
    Example:
      appliancectl stress --hours 0.1
      appliancectl stress --hours 72 --json
    """
    command = _command(place, assignments, hours, seed)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        assert engine.stderr is not None
        words = ""
        for words in engine.stderr:
            if not as_json:
                say(words.rstrip("\n"))
        report = _report(engine.stdout.read())  # one line, at the end: it waits in the pipe
    if report is None:
        raise ApplianceError(f"the engine under stress ended with code {engine.returncode}: {words.strip() or 'without a word'}")
    if as_json:
        say_json(report)
    else:
        _say(report)
    return ExitCode.OK if report["passed"] else ExitCode.BAD


def _command(place: Place, assignments: tuple[str, ...], hours: float, seed: int) -> list[str]:
    """Of the engine's module that does it. Raises ApplianceError where there is no model or no engine."""
    from appliance.config.runtimes import launch_python, with_runtime

    state_dir = serving_state_dir(place)
    config = with_runtime(place.load(assignments).config, state_dir)
    engine = config.engine
    if engine.backend != "native":
        raise ApplianceError(
            f"engine.backend is {engine.backend!r}: stress is for the built-in engine", hint="appliancectl bench sends requests to any"
        )
    python = launch_python(engine.python)
    if python is None:
        raise ApplianceError("the built-in engine is not set up on this machine", hint="make its environment: appliancectl setup")
    return [
        python, "-m", "appliance.engine.stress",
        "--model", str(model_folder(config.model.path, state_dir / MODELS)),
        "--seconds", str(hours * HOUR_S),
        "--seed", str(seed),
        "--threads", str(engine.threads),
        "--block-tokens", str(engine.block_tokens),
        "--weights-dtype", engine.weights_dtype,
        "--device", engine.device,
    ]  # fmt: skip


def _report(line: str) -> dict[str, Any] | None:
    try:
        report: Any = json.loads(line)
    except ValueError:
        return None
    return report if isinstance(report, dict) and "passed" in report else None


def _say(report: dict[str, Any]) -> None:
    for fault in report["faults"]:
        say(fault)
    shown = ("rounds", "requests", "tokens", "preemptions", "swaps", "evictions", "cached_tokens", "compared", "aborted")
    fields([(name.replace("_", " "), f"{report[name]:,}") for name in shown])
