"""appliancectl config check | show."""

import json
import re
import tomllib
from pathlib import Path

from appliance.config import Config, load_config


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "appliance.toml"
    path.write_text(text)
    return path


def test_check_of_a_good_file_ends_with_its_name(ctl, tmp_path: Path) -> None:
    """Exit code 0; that no model is named is worth a word, and no failure: `run` brings one."""
    path = _file(tmp_path, "[gateway]\nport = 0\n")
    said = ctl("--config", path, "config", "check")
    assert said.code == 0
    assert said.out.startswith("warn model: model.path is not set\n")
    assert said.out.endswith(f"ok {path}\n")


def test_check_prints_every_error_with_file_key_and_nearest(ctl, tmp_path: Path) -> None:
    """Exit code 1; all of them at once."""
    path = _file(tmp_path, "[gateway]\nprot = 8080\nhost = 7\n[engin]\n")
    said = ctl("--config", path, "config", "check")
    assert said.code == 1
    assert f"error {path}: unknown key gateway.prot; did you mean gateway.port?" in said.out
    assert f"error {path}: gateway.host = 7: expected a string, found a whole number" in said.out
    assert f"error {path}: unknown table [engin]; did you mean engine?" in said.out
    assert "3 errors" in said.out


def test_check_as_json_has_the_same_errors(ctl, tmp_path: Path) -> None:
    """For programs."""
    path = _file(tmp_path, "[gateway]\nprot = 8080\n")
    said = ctl("--config", path, "config", "check", "--json")
    data = json.loads(said.out)
    assert (said.code, data["ok"], data["file"]) == (1, False, str(path))
    assert data["errors"] == [f"{path}: unknown key gateway.prot; did you mean gateway.port?"]


def test_show_can_be_pasted_and_says_where_each_value_came_from(ctl, tmp_path: Path) -> None:
    """The output is TOML; read back it is the same configuration."""
    path = _file(tmp_path, "[gateway]\nport = 8080\n[model]\nname = 'a\"b'\n")
    said = ctl("--config", path, "config", "show", "--set", "engine.threads=2")
    assert said.code == 0
    assert re.search(rf"^port = 8080 +# {re.escape(str(path))}$", said.out, re.M)
    assert re.search(r"^threads = 2 +# command line$", said.out, re.M)
    assert re.search(r'^host = "127\.0\.0\.1" +# built-in default$', said.out, re.M)
    again = _file(tmp_path, said.out)
    assert load_config(again).config == load_config(None, {"gateway.port": 8080, "model.name": 'a"b', "engine.threads": 2}).config


def test_show_changed_leaves_the_defaults_out(ctl, tmp_path: Path) -> None:
    """What the owner decided."""
    path = _file(tmp_path, "[gateway]\nport = 8080\n")
    said = ctl("--config", path, "config", "show", "--changed")
    assert tomllib.loads(said.out) == {"gateway": {"port": 8080}}


def test_show_as_json_has_every_key_with_its_origin(ctl) -> None:
    """Sizes in bytes and durations in seconds, as inside."""
    data = json.loads(ctl("config", "show", "--json").out)
    assert set(data) == set(load_config(None).origins)
    assert data["gateway.max_body_bytes"] == {"value": Config().gateway.max_body_bytes, "from": "built-in default"}


def test_show_of_a_broken_file_is_the_errors(ctl, tmp_path: Path) -> None:
    """Nothing is in force, so nothing is shown."""
    said = ctl("--config", _file(tmp_path, "[gateway]\nprot = 1\n"), "config", "show")
    assert (said.code, said.out) == (1, "")
    assert "did you mean gateway.port?" in said.err
