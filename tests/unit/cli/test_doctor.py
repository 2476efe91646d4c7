"""`appliancectl doctor` as a command."""

import json
from pathlib import Path

from appliance.cli.models import DEMO_MODEL
from tests.unit.cli.conftest import Ctl


def test_it_prints_a_cure_below_each_trouble(ctl: Ctl, tmp_path: Path) -> None:
    """For people."""
    said = ctl("--state-dir", tmp_path, "doctor")
    assert "model.path is not set" in said.out
    assert "cure: appliancectl setup" in said.out


def test_the_demo_model_is_a_model_where_run_serves_it(ctl: Ctl, tmp_path: Path) -> None:
    """As after `make run`, which names no model: neither `doctor` nor `config check` asks for one."""
    folder = tmp_path / "models" / DEMO_MODEL
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert f"model: {folder}: the demo model" in ctl("--state-dir", tmp_path, "doctor").out
    assert "model" not in ctl("--state-dir", tmp_path, "config", "check").out


def test_the_exit_code_tells_failures_from_warnings(ctl: Ctl, tmp_path: Path) -> None:
    """1 for a failure; JSON has the same findings."""
    config = tmp_path / "appliance.toml"
    config.write_text('[model]\npath = "/nowhere"\n')
    said = ctl("--config", config, "--state-dir", tmp_path, "doctor", "--json")
    document = json.loads(said.out)
    assert (said.code, document["ok"]) == (1, False)
    assert any(row["level"] == "fail" and "/nowhere" in row["reason"] for row in document["findings"])
