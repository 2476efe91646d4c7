"""`appliancectl run`."""

from __future__ import annotations

import json
import shutil
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from appliance.cli.config import set_option
from appliance.cli.models import MODELS, gguf, has_chat_template, model_folder
from appliance.cli.place import CONTROL_SOCKET, Place, own_state_dir
from appliance.cli.printing import bad, bold, coloured, good
from appliance.cli.verbs import Verb
from appliance.config import Config
from appliance.config.runtimes import with_runtime
from appliance.core.errors import ConfigError, ExitCode
from appliance.core.printable import printable
from appliance.core.publication import Publication
from appliance.core.states import EngineState
from appliance.core.units import format_duration

KILL_MARGIN_S = 10.0
"""On top of a child's own deadline for a clean end."""


@click.command(cls=Verb)
@click.option("--model", "model_path", metavar="DIR", help="Folder of the model [default: model.path, else the demo model].")
@click.option("--host", help="Address to listen on [default: gateway.host].")
@click.option("--port", type=click.IntRange(0, 65535), help="Port to listen on; 0: any free one [default: gateway.port].")
@set_option
@click.pass_obj
def run(place: Place, model_path: str | None, host: str | None, port: int | None, assignments: tuple[str, ...]) -> ExitCode:
    """Serve in the foreground, without systemd or root.

    Starts applianced and the gateway, restarts whichever dies, prints the address when the model answers. Ctrl-C lets
    running answers finish; a second one stops at once. State is kept in --state-dir.

    \b
    Example:
      appliancectl run
      appliancectl run --model /srv/models/my-model --port 8080
    """
    from appliance.cli.foreground import folders
    from appliance.listening import open_listener, refuse_open, url_of

    named = [("model.path", model_path), ("gateway.host", host), ("gateway.port", port)]
    settings = [*assignments, *(f"{key}={value}" for key, value in named if value is not None)]
    place.load(assignments)  # by itself: an option may stand over a wrong --set
    config = place.load(settings).config
    wanted = place.state_dir or own_state_dir()
    model = _model(config, wanted)
    _check(config, wanted, model)
    state_dir = folders.prepare_state_dir(wanted)
    with folders.lock_state_dir(state_dir):
        run_dir = folders.check_run_dir(place.run_dir) if place.run_dir else folders.prepare_run_dir(state_dir)
        folders.refuse_shared(run_dir)
        listener = open_listener(config.gateway.host, config.gateway.port)
        refuse_open([listener], allowed=config.gateway.allow_open or bool(config.gateway.api_keys_file))
        if model is not None:
            settings.append(f"model.path={model}")
        arguments = _arguments(place, state_dir, run_dir, settings)
        url = url_of(listener, tls=bool(config.gateway.tls_certificate))
        code = _serve(config, arguments, run_dir, listener, _announcer(url, model, place, state_dir))
        folders.leave_run_dir(state_dir)
    return code


def _model(config: Config, state_dir: Path) -> Path | None:
    """The model's folder, or llama.cpp's file; None where the owner's own engine brings its own."""
    if config.engine.backend == "custom" and not config.model.path:
        return None
    if config.engine.backend == "llamacpp":
        return gguf(config.model.path)
    return model_folder(config.model.path, state_dir / MODELS)


def _check(config: Config, state_dir: Path, model: Path | None) -> None:
    """Raises ConfigError for what would end the start of a child, all of it."""
    from appliance.cli.checks import configured
    from appliance.cli.checks.box import check_engine
    from appliance.cli.checks.machine import Level

    checks = (
        *check_engine(config, state_dir),
        *configured.check_files(config),
        *configured.check_programs(config),
        *configured.check_engine_of_others(with_runtime(config, state_dir)),
        *configured.check_options(with_runtime(config, state_dir)),
        *configured.check_memory(config, model),
    )
    failed = [finding for finding in checks if finding.level is Level.FAIL or finding.unseen]  # it is this user who serves
    if failed:
        raise ConfigError("\n".join(f"{one.name}: {one.reason}" for one in failed), hint="; ".join({one.cure: None for one in failed}))


def _arguments(place: Place, state_dir: Path, run_dir: Path, settings: Sequence[str]) -> list[str]:
    """What applianced and the gateway are both told."""
    arguments = ["--state-dir", str(state_dir), "--run-dir", str(run_dir)]
    if (file := place.config_file()) is not None:
        arguments += ["--config", str(file.absolute())]
    for setting in settings:
        arguments += ["--set", setting]
    return arguments


def _serve(
    config: Config,
    arguments: Sequence[str],
    run_dir: Path,
    listener: socket.socket,
    announce: Callable[[Publication], str | None],
) -> ExitCode:
    from appliance.cli.foreground.children import Child
    from appliance.cli.foreground.notices import Notices
    from appliance.cli.foreground.output import Output
    from appliance.cli.foreground.publications import PublicationFeed
    from appliance.cli.foreground.session import WATCHDOG_S, Member, Session

    fd = listener.fileno()
    notices = Notices(run_dir)
    environment = notices.environment(WATCHDOG_S)
    command = [sys.executable, "-m", "appliance.gateway", *arguments, "--fd", str(fd)]
    gateway = Child("gateway", command, inherited_fds=[fd], environment=environment)
    applianced = Child("applianced", [sys.executable, "-m", "appliance.supervisor", *arguments], environment=environment)
    members = (
        Member(gateway, config.gateway.drain_s + KILL_MARGIN_S),
        Member(applianced, config.supervisor.stop_deadline_s + KILL_MARGIN_S),
    )
    feed = PublicationFeed(run_dir / CONTROL_SOCKET)
    return Session(members, feed, notices, Output(sys.stdout.fileno(), coloured=coloured()), announce, listener).run()


def _announcer(url: str, model: Path | None, place: Place, state_dir: Path) -> Callable[[Publication], str | None]:
    """Says once, when the first engine serves, where it is and how to ask it; and each time that a person is needed, why."""
    started_s = time.monotonic()
    told = False

    def announce(publication: Publication) -> str | None:
        nonlocal told
        if publication.state is EngineState.PARKED:
            words = f"{bad('Not serving')}: {printable(publication.reason)}"
            return "\n".join(("", f"  {words}", "", f"  {_ctl(place, state_dir)} resume", "  tries again; Ctrl-C stops.", ""))
        if told or publication.endpoint is None or publication.limits is None:
            return None
        told = True
        ready_s = time.monotonic() - started_s
        return _welcome(url, publication.limits.model_id, model, ready_s, _ctl(place, state_dir))

    return announce


def _ctl(place: Place, state_dir: Path) -> str:
    """appliancectl as it must be called in another terminal to mean this appliance."""
    program = "appliancectl" if shutil.which("appliancectl") else str(Path(sys.argv[0]).absolute())
    if program.endswith(".py"):  # python -m appliance.cli
        program = f"{sys.executable} -m appliance.cli"
    if place.run_dir is not None:
        return f"{program} --run-dir {place.run_dir.absolute()} --state-dir {state_dir}"
    return program if place.state_dir is None else f"{program} --state-dir {state_dir}"


def _welcome(url: str, model_id: str, model: Path | None, ready_s: float, ctl: str) -> str:
    body: dict[str, object] = {"model": model_id, "max_tokens": 64, "temperature": 0}
    if model is None or has_chat_template(model):
        path = "chat/completions"
        body["messages"] = [{"role": "user", "content": "Name the capital of France."}]
    else:
        path = "completions"
        body["prompt"] = "Once upon a time"
    quoted = json.dumps(body, ensure_ascii=False).replace("'", "'\\''")
    return "\n".join(
        (
            "",
            f"  {good('Serving')} {bold(model_id)} at {bold(url + '/v1')} (ready after {format_duration(ready_s)}). Try:",
            "",
            f"  curl {url}/v1/{path} -H 'Content-Type: application/json' -d '{quoted}'",
            "",
            f"  {ctl} status",
            "  Ctrl-C stops.",
            "",
        )
    )
