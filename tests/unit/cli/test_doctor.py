"""`appliancectl doctor` as a command."""

import json
from pathlib import Path

from tests.unit.cli.conftest import Ctl


def test_it_prints_a_cure_below_each_trouble(ctl: Ctl, tmp_path: Path) -> None:
    """For people."""
    said = ctl("--state-dir", tmp_path, "doctor")
    assert "model.path is not set" in said.out
    assert "cure: appliancectl setup" in said.out


def test_the_exit_code_tells_failures_from_warnings(ctl: Ctl, tmp_path: Path) -> None:
    """1 for a failure; JSON has the same findings."""
    config = tmp_path / "appliance.toml"
    config.write_text('[model]\npath = "/nowhere"\n')
    said = ctl("--config", config, "--state-dir", tmp_path, "doctor", "--json")
    document = json.loads(said.out)
    assert (said.code, document["ok"]) == (1, False)
    assert any(row["level"] == "fail" and "/nowhere" in row["reason"] for row in document["findings"])
