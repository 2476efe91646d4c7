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


def test_check_names_what_a_later_drop_in_shadows(ctl, tmp_path: Path) -> None:
    """Which file wins. A warning between two that somebody wrote, a word where a drop-in does what it is for, nothing where both agree."""
    path = _file(tmp_path, "[gateway]\nport = 0\n[engine]\nmax_running = 2\n")
    folder = tmp_path / "conf.d"
    folder.mkdir()
    (folder / "50-setup.toml").write_text("[engine]\nkv_pool_bytes = '64MiB'\n")
    (folder / "60-mine.toml").write_text("[engine]\nkv_pool_bytes = '128MiB'\nmax_running = 3\n[admission]\nqueue_size = 5\n")
    (folder / "70-other.toml").write_text("[admission]\nqueue_size = 6\n[engine]\nmax_running = 3\n")
    said = ctl("--config", path, "config", "check")
    assert said.code == 0
    assert f"ok   engine.max_running: 2 of {path} is not in force: {folder}/60-mine.toml says another" in said.out
    assert f'ok   engine.kv_pool_bytes: "64MiB" of {folder}/50-setup.toml is not in force' in said.out
    assert f"warn admission.queue_size: 5 of {folder}/60-mine.toml is not in force: {folder}/70-other.toml says another" in said.out
    assert "70-other.toml wins" in said.out
    assert said.out.count("not in force") == 3


def test_check_names_a_drop_in_that_is_not_read(ctl, tmp_path: Path) -> None:
    """Its name does not end in .toml; what editors and dpkg leave behind is nobody's drop-in."""
    path = _file(tmp_path, "[gateway]\nport = 0\n")
    folder = tmp_path / "conf.d"
    folder.mkdir()
    for name in ("60-network.conf", "60-a.toml~", "60-a.toml.dpkg-old", ".60-a.toml.swp", "README"):
        (folder / name).write_text("[gateway]\nport = 1\n")
    said = ctl("--config", path, "config", "check")
    assert [line for line in said.out.splitlines() if "not read" in line] == [
        f"warn {folder}/60-network.conf: is not read: its name does not end in .toml"
    ]
