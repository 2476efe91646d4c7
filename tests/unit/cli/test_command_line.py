"""What holds for every verb: help with an example, exit codes, errors in words, no colours in pipes."""

import importlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from appliance.cli.verbs import VERBS

ROOT = Path(__file__).parents[3]


def _commands() -> Iterator[tuple[str, click.Command]]:
    for verb, (module, _) in VERBS.items():
        command = getattr(importlib.import_module(f"appliance.cli.{module}"), verb)
        if isinstance(command, click.Group):
            yield from ((f"{verb} {name}", sub) for name, sub in command.commands.items())
        else:
            yield verb, command


def _shell(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "appliance.cli", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("verb", VERBS)
def test_the_line_in_the_list_of_verbs_is_the_verbs_own(verb: str) -> None:
    """--help reads a table instead of loading every module; the table must not tell other things."""
    module, line = VERBS[verb]
    command = getattr(importlib.import_module(f"appliance.cli.{module}"), verb)
    assert (command.help or "").partition("\n")[0] == line


@pytest.mark.parametrize(("name", "command"), [pytest.param(name, command, id=name) for name, command in _commands()])
def test_every_verb_shows_an_example_and_takes_the_shared_options(ctl, name: str, command: click.Command) -> None:
    """An example that starts with the program's name and uses the verb."""
    said = ctl(*name.split(), "--help")
    assert said.code == 0
    assert re.search(rf"Examples?:\n +appliancectl .*{name}", said.out)
    assert all(option in said.out for option in ("--config", "--run-dir", "--state-dir"))
    assert all(parameter.help for parameter in command.params if isinstance(parameter, click.Option))


def test_a_mistyped_verb_names_the_nearest(ctl) -> None:
    """Exit code 2, and where to read on."""
    said = ctl("statsu")
    assert (said.code, said.out) == (2, "")
    assert said.err == "appliancectl: no verb 'statsu'; did you mean status?\n  see `appliancectl --help`\n"


@pytest.mark.parametrize(
    "arguments", [["--nope"], ["status", "--nope"], ["status", "extra"], ["run", "--port", "70000"], ["config", "chek"]]
)
def test_wrong_usage_is_exit_code_2_with_a_way_on(ctl, arguments: list[str]) -> None:
    """One sentence on stderr, nothing on stdout."""
    said = ctl(*arguments)
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("appliancectl: ")
    assert "--help`" in said.err


@pytest.mark.parametrize("arguments", [[], ["config"]])
def test_no_verb_prints_the_help(ctl, arguments: list[str]) -> None:
    """Somebody who types the bare name wants to know what there is."""
    said = ctl(*arguments)
    assert "Usage: appliancectl" in said.out + said.err
    assert "Traceback" not in said.err


@pytest.mark.parametrize("verb", ["status", "restart", "drain", "resume"])
def test_without_applianced_it_is_exit_code_3_with_the_cure(ctl, tmp_path: Path, verb: str) -> None:
    """The socket's path is named, and how to start what should listen there."""
    said = ctl("--run-dir", tmp_path, verb)
    assert (said.code, said.out) == (3, "")
    assert f"nobody listens on {tmp_path}/control.sock" in said.err
    assert "systemctl start llm-appliance" in said.err


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_a_socket_of_somebody_else_is_exit_code_4_with_the_cure(tmp_path: Path) -> None:
    """A user outside the group is told which group."""
    import socket
    import tempfile

    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        Path(folder).chmod(0o755)
        listener.bind(f"{folder}/control.sock")
        listener.listen()
        Path(f"{folder}/control.sock").chmod(0o660)
        program = (
            f"import os, sys; os.setgroups([]); os.setgid(65534); os.setuid(65534); sys.exit(run(['--run-dir', {folder!r}, 'status']))"
        )
        ended = subprocess.run(
            [
                sys.executable,
                "-c",
                f"from appliance.cli.__main__ import run; import appliance.cli.status, appliance.control.client; {program}",
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert ended.returncode == 4, ended.stderr
    assert "permission denied" in ended.stderr
    assert "llm-appliance" in ended.stderr


def test_no_colours_in_pipes() -> None:
    """Neither on stdout nor on stderr."""
    for arguments in (["config", "check", "--set", "gateway.prot=1"], ["statsu"]):
        said = _shell(*arguments)
        assert "\x1b" not in said.stdout + said.stderr


def test_options_may_stand_before_or_after_the_verb_and_the_last_wins(ctl, tmp_path: Path) -> None:
    """People write both."""
    one, two = tmp_path / "one", tmp_path / "two"
    assert f"{one}/control.sock" in ctl("--run-dir", one, "status").err
    assert f"{two}/control.sock" in ctl("status", "--run-dir", two).err
    assert f"{two}/control.sock" in ctl("--run-dir", one, "status", "--run-dir", two).err


def test_the_config_may_come_from_the_environment_and_the_option_wins(tmp_path: Path) -> None:
    """LLM_APPLIANCE_CONFIG is the only variable."""
    (tmp_path / "env.toml").write_text("[gateway]\nport = 1111\n")
    (tmp_path / "option.toml").write_text("[gateway]\nport = 2222\n")
    from_env = _shell("config", "show", "--changed", LLM_APPLIANCE_CONFIG=str(tmp_path / "env.toml"))
    assert "port = 1111" in from_env.stdout
    from_option = _shell(
        "--config", str(tmp_path / "option.toml"), "config", "show", "--changed", LLM_APPLIANCE_CONFIG=str(tmp_path / "env.toml")
    )
    assert "port = 2222" in from_option.stdout


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    """`appliancectl config show | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "appliance.cli", "config", "show"],
            cwd=ROOT,
            stdout=writer,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writer)
    assert ended.stderr == b""


def test_ctrl_c_is_quiet_and_130(tmp_path: Path) -> None:
    """No traceback while waiting for an answer of applianced."""
    import socket

    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(tmp_path / "control.sock"))
        deaf.listen()
        deaf.settimeout(30)
        asking = subprocess.Popen(
            [sys.executable, "-m", "appliance.cli", "--run-dir", str(tmp_path), "status"],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        connection, _ = deaf.accept()
        with connection:
            assert connection.recv(1)  # it has asked and waits
            asking.send_signal(signal.SIGINT)
            _, err = asking.communicate(timeout=30)
    assert (asking.returncode, err.strip()) == (130, b"")
