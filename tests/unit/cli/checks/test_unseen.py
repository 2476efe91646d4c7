"""What this user may not look into: told as unknown, with the folder that is closed, and never called missing."""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance.cli.checks import configured
from appliance.cli.checks.box import check_engine, check_model
from appliance.cli.checks.machine import Finding, Level, barrier_of
from appliance.cli.models import model_folder
from appliance.cli.place import Place
from appliance.cli.plan_facts import find_model_path
from appliance.cli.setup import shown_state_dir
from appliance.config import Config, load_config
from appliance.core.errors import ModelError, NotPermitted

NOBODY = 65534


def as_anybody(work: Callable[[], Any]) -> Any:
    """The result of `work`, done by a user who owns nothing here. Only root has to become one."""
    if os.geteuid() != 0:
        return work()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            os.write(writing, pickle.dumps(work()))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        answer = stream.read()
    os.waitpid(child, 0)
    return pickle.loads(answer)


@pytest.fixture
def closed() -> Iterator[Path]:
    """A folder that is the service's own, such as /var/lib/llm-appliance, below one that everybody may enter."""
    outside = Path(tempfile.mkdtemp(prefix="closed-"))
    outside.chmod(0o755)
    folder = outside / "state"
    (folder / "runtimes").mkdir(parents=True)
    (folder / "model").mkdir()
    (folder / "file").write_text("x")
    folder.chmod(0)
    yield folder
    folder.chmod(0o700)
    shutil.rmtree(outside)


def test_the_first_closed_folder_on_the_way_is_named(closed: Path) -> None:
    """Not for root, not for what is not there, not for what anybody may read."""
    assert as_anybody(lambda: barrier_of(closed / "model" / "config.json")) == closed
    assert as_anybody(lambda: barrier_of(closed)) == closed
    assert as_anybody(lambda: barrier_of(closed.parent / "none" / "at all")) is None
    assert as_anybody(lambda: barrier_of(closed.parent)) is None
    closed.chmod(0o711)
    (closed / "file").chmod(0o600)
    assert as_anybody(lambda: barrier_of(closed / "file")) == closed / "file"


def _checked(file: Path) -> tuple[Finding, ...]:
    config = load_config(file).config
    return (*check_model(config, Path("nothing")), *configured.check_files(config), *configured.check_programs(config))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('[model]\npath = "{}/model"', "model"),
        ('[gateway]\napi_keys_file = "{}/keys"', "gateway.api_keys_file"),
        ('[gateway]\ntls_certificate = "{}/cert"\ntls_key = "{}/key"', "gateway.tls_certificate"),
        ('[fallback]\nbase_url = "http://x"\napi_key_file = "{}/key"', "fallback.api_key_file"),
        ('[diagnosis]\npatterns_dir = "{}/patterns"', "diagnosis.patterns_dir"),
        ('[engine]\nbackend = "custom"\ncommand = ["{}/engine", "{{port}}"]', "engine.command"),
        ('[supervisor]\non_park = ["{}/hook"]', "supervisor.on_park"),
    ],
)
def test_a_file_behind_a_closed_door_is_not_called_missing(closed: Path, text: str, name: str) -> None:
    """A warning that names the folder, and who should look."""
    file = closed.parent / "appliance.toml"
    file.write_text(text.format(closed, closed))
    file.chmod(0o644)
    found = as_anybody(lambda: _checked(file))
    (finding,) = [one for one in found if one.name == name]
    assert (finding.level, finding.unseen) == (Level.WARN, True)
    assert f"this user may not read {closed}" in finding.reason
    assert "as root" in finding.cure


def test_an_engine_behind_a_closed_door_is_not_called_missing(closed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on every box with the package, for who is not in the service's group."""
    monkeypatch.setattr("appliance.cli.checks.box.engine_is_here", lambda: False)
    (finding,) = as_anybody(lambda: tuple(check_engine(Config(), closed)))
    assert (finding.level, finding.unseen) == (Level.WARN, True)


def test_an_engine_that_is_set_up_elsewhere_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`appliancectl run` of root, on a box whose service is set up: another setup of the service would cure nothing."""
    box = tmp_path / "box"
    monkeypatch.setattr("appliance.cli.checks.box.engine_is_here", lambda: False)
    monkeypatch.setattr("appliance.cli.checks.box.SYSTEM_STATE_DIR", box)
    monkeypatch.setattr("appliance.cli.checks.box.current_runtime", lambda folder: folder if folder == box else None)
    (finding,) = check_engine(Config(), tmp_path / "own")
    assert finding.level is Level.FAIL
    assert "systemctl start llm-appliance" in finding.cure
    assert f"--state-dir {tmp_path / 'own'} setup" in finding.cure


def test_plan_refuses_a_model_that_it_may_not_read_and_still_knows_the_well_known(closed: Path) -> None:
    """Of somebody who is not in the service's group: its model's folder is closed, and the names in it too."""

    def found(name: str) -> str:
        try:
            return str(find_model_path(Place(state_dir=closed), name))
        except ModelError as error:
            return error.message

    assert f"may not look into {closed}" in as_anybody(lambda: found(str(closed / "models" / "mine")))
    assert as_anybody(lambda: found("qwen3-14b")) == "qwen3-14b"


@pytest.mark.parametrize("shown", [True, False], ids=["in the group", "not in it"])
def test_lists_of_a_box_are_not_called_empty_by_who_may_not_write_there(closed: Path, monkeypatch: pytest.MonkeyPatch, shown: bool) -> None:
    """`model list` and `runtime list` of somebody without an appliance of its own are about the box's, or refused."""
    monkeypatch.setattr("appliance.cli.setup.SYSTEM_STATE_DIR", closed)
    monkeypatch.setenv("XDG_STATE_HOME", str(closed.parent / "none"))
    closed.chmod(0o755 if shown else 0)

    def found() -> str:
        try:
            return str(shown_state_dir(Place()))
        except NotPermitted as error:
            return f"{error.message}; {error.hint}"

    told = as_anybody(found)
    assert told == str(closed) if shown else f"may not look into {closed}; run as root or join the group" in told


def test_run_refuses_a_model_that_it_may_not_read(closed: Path) -> None:
    """In words: it would serve as this very user."""

    def refusal() -> str:
        try:
            model_folder(str(closed / "model"), closed)
        except ModelError as error:
            return error.message
        return ""

    assert f"may not look into {closed}" in as_anybody(refusal)
