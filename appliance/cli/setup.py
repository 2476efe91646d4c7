"""`appliancectl setup`: the engine, a model, and the lines of configuration that name it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from appliance.cli import owner, pip_runs, recipes, runtimes, setup_config, setup_plan
from appliance.cli.checks.machine import barrier_of
from appliance.cli.models import DEMO_MODEL, MODELS, model_folder
from appliance.cli.place import CONTROL_SOCKET, SYSTEM_RUN_DIR, SYSTEM_STATE_DIR, Place, own_state_dir
from appliance.cli.printing import bold, good, say
from appliance.cli.verbs import Verb
from appliance.config.load import DEFAULT_PATH
from appliance.config.runtimes import engine_is_here, launch_python, with_runtime
from appliance.core.errors import ApplianceError, ExitCode, NotPermitted
from appliance.orphans import ends_with_us

_FOLDER = click.Path(path_type=Path, file_okay=False, resolve_path=True)
_WHEELS = click.Path(path_type=Path, file_okay=False, resolve_path=True, exists=True)


@click.command(cls=Verb)
@click.option("--demo", is_flag=True, help="Bring the demo model: SmolLM2-135M-Instruct, 135 million parameters, for the CPU.")
@click.option("--model", metavar="DIR", help="Serve this folder's model: config.json, *.safetensors and tokenizer.json.")
@click.option("--models-dir", type=_FOLDER, help="Where models are kept [default: `models` in the state folder].")
@click.option("--wheelhouse", type=_WHEELS, help="Folder with all wheels, for a machine without a network.")
@click.option("--python", help="Python interpreter of the engine's environment [default: engine.python, else what setup makes].")
@click.option("--no-config", is_flag=True, help="Bring things only; write no configuration.")
@click.option("--yes", is_flag=True, help="Ask nothing; what is not named is left as it is.")
@click.pass_obj
def setup(
    place: Place,
    demo: bool,
    model: str | None,
    models_dir: Path | None,
    wheelhouse: Path | None,
    python: str | None,
    no_config: bool,
    yes: bool,
) -> ExitCode:
    """Bring what is needed to serve.

    Looks at the machine as doctor does; makes the environment of the built-in engine, where it is not part of this installation;
    brings the demo model, or plans the memory for yours; and writes a drop-in of the configuration. Can be run again: what is
    there and whole is kept, what was interrupted is made anew, what you have edited is never overwritten unasked.

    \b
    Example:
      appliancectl setup --demo
      appliancectl setup --model /srv/models/my-model
      appliancectl setup --demo --yes --wheelhouse /media/wheels
    """
    if demo and model:
        raise click.UsageError("--demo and --model name two models; serve one of them")
    state_dir = state_dir_of(place)
    is_box = state_dir == SYSTEM_STATE_DIR and not no_config
    asks = not yes and sys.stdin.isatty()
    if is_box:
        _look_around()
    if asks and not demo and model is None:
        demo, model = _ask_for_model()
    if not demo and model is None and engine_is_here():
        raise click.UsageError("say what to set up: --demo brings the demo model, --model names yours")
    named = model_folder(model, Path()) if model else None
    values: dict[str, object] = {"model.path": str((models_dir or state_dir / MODELS) / DEMO_MODEL)} if demo else {}
    if is_box and named is not None:
        values = _plan(place, named)
    wanted = _Wanted(demo, models_dir or state_dir / MODELS, wheelhouse, python)
    other = owner.other_owner(state_dir)
    code = _bring(place, state_dir, wanted) if other is None else owner.again_as(other, state_dir, wanted.arguments())
    if code is ExitCode.OK and is_box:
        _configure(place, values, asks=asks)
    return code


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What is to be brought into the state folder."""

    demo: bool
    models_dir: Path
    wheelhouse: Path | None
    python: str | None

    def arguments(self) -> list[str]:
        """As a command line."""
        words = ["setup", "--yes", "--no-config", "--models-dir", str(self.models_dir), *(["--demo"] if self.demo else [])]
        words += ["--wheelhouse", str(self.wheelhouse)] if self.wheelhouse else []
        return words + (["--python", self.python] if self.python else [])


def _bring(place: Place, state_dir: Path, wanted: _Wanted) -> ExitCode:
    config = place.load().config
    named = wanted.python or config.engine.python
    if not engine_is_here() and config.engine.backend == "native" and not named:
        runtime = runtimes.install(recipes.native(recipes.packaged_wheel()), state_dir, runtimes.Means(wanted.wheelhouse))
        say(f"{good('ok')} the built-in engine: {runtime}")
    python = named or launch_python(with_runtime(config, state_dir).engine.python)
    return _bring_demo(python or sys.executable, wanted) if wanted.demo else ExitCode.OK


def bring_demo(place: Place, state_dir: Path, models_dir: Path) -> ExitCode:
    """The demo model, and the built-in engine's environment where it needs one. Raises ApplianceError."""
    return _bring(place, state_dir, _Wanted(demo=True, models_dir=models_dir, wheelhouse=None, python=None))


def _bring_demo(python: str, wanted: _Wanted) -> ExitCode:
    # Our own PYTHONPATH is for the control plane, where it is packaged; in a checkout the engine may need what is set.
    environment = dict(os.environ) if engine_is_here() else pip_runs.pip_environment(wanted.wheelhouse)
    try:
        command = [python, "-m", "appliance.engine.demo", str(wanted.models_dir)]
        ended = subprocess.run(command, env=environment, check=False, preexec_fn=ends_with_us())
    except OSError as error:
        raise ApplianceError(f"cannot run {python}: {error.strerror}", hint="set engine.python, or --python, to a Python 3.11") from None
    return ExitCode.OK if ended.returncode == 0 else ExitCode.BAD


def _look_around() -> None:
    """What doctor finds wrong with the machine, before anything is fetched; it stops nothing."""
    from appliance.cli.doctor import troubles_of_the_machine
    from appliance.cli.findings import say_finding

    for finding in troubles_of_the_machine(SYSTEM_STATE_DIR):
        say_finding(finding)


def _plan(place: Place, model: Path) -> dict[str, object]:
    config = place.load().config
    if config.engine.backend != "native":
        return {"model.path": str(model)}
    found = setup_plan.planned(model, config)
    say(f"{good('ok')} the plan: {found.sentence}")
    return found.values


def _configure(place: Place, values: Mapping[str, object], *, asks: bool) -> None:
    folder = (place.config_file() or DEFAULT_PATH).parent / "conf.d"
    if values:
        file = folder / setup_config.NAME
        edited = asks and file.exists() and setup_config.is_edited(file.read_text(encoding="utf-8", errors="replace"))
        may_replace = edited and click.confirm(f"{file} was edited. Write it anew and lose the edits?")
        setup_config.write(folder, values, may_replace=may_replace)
        say(f"{good('ok')} {file}: {', '.join(f'{key} = {value}' for key, value in values.items())}")
    said = place.load().config.model.path
    if not said:
        say("No model is configured yet: `appliancectl setup --model DIR`, or --demo for a small one.")
    elif (SYSTEM_RUN_DIR / CONTROL_SOCKET).exists():
        say(f"In force after {bold('systemctl restart llm-appliance')}.")
    else:
        say(f"Next: {bold('systemctl start llm-appliance')}")


def _ask_for_model() -> tuple[bool, str | None]:
    say("Which model shall be served?")
    say("  a folder with config.json, *.safetensors and tokenizer.json,")
    say("  demo: a small one that is fetched now (135 million parameters, for the CPU),")
    say("  or nothing, to name one later.")
    answer = click.prompt("Folder, demo or nothing", default="", show_default=False).strip()
    return answer == "demo", answer if answer not in ("", "demo") else None


def state_dir_of(place: Place) -> Path:
    """The one that was named, else the box's where we may write there, else this user's own."""
    if place.state_dir is not None:
        return place.state_dir
    return SYSTEM_STATE_DIR if os.access(SYSTEM_STATE_DIR, os.W_OK) else own_state_dir()


def shown_state_dir(place: Place) -> Path:
    """To look into: also the box's that others write, where this user has none of its own.

    Raises:
        NotPermitted: that one is closed to this user. It is not called empty.
    """
    folder = state_dir_of(place)
    if place.state_dir is not None or folder.exists() or not SYSTEM_STATE_DIR.exists():
        return folder
    if (barrier := barrier_of(SYSTEM_STATE_DIR)) is not None:
        raise NotPermitted(f"this user may not look into {barrier}", hint="run as root or join the group llm-appliance")
    return SYSTEM_STATE_DIR
