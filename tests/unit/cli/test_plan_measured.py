"""`appliancectl plan` on a box whose engine has been started before: its own measurements are used, and only for what they hold."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.control.codec import to_json
from appliance.core.units import GIB, MIB
from appliance.planner.calibration import PREFIX, Calibration, Proof, Setting
from appliance.planner.inputs import Measured
from appliance.planner.model_files import model_identity
from appliance.supervisor.incidents import IncidentStore
from tests.unit.planner import shapes

SETTING = Setting(256, 8, 8192, "float32")


class Box:
    """A state folder with what applianced keeps, and a model folder."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "state"
        self.state.mkdir()
        self.model = folder / "small-llama"
        self.model.mkdir()
        (self.model / "config.json").write_text(json.dumps(shapes.dense(num_hidden_layers=4, max_position_embeddings=8192)))
        self.known = Calibration(
            "cpu", "native", "0.1.0", model_identity(self.model),
            measured=Measured(20 * GIB, 3 * GIB, kv_pool_bytes=GIB, source="the start of 2026-11-30 07:00"), setting=SETTING,
            proofs=(Proof(SETTING, 8191, 700 * MIB, 5 * GIB, True, "as judged", 5.0),), time_s=5.0, model_path=str(self.model),
        )  # fmt: skip
        self.keep(self.known)

    def keep(self, *calibrations: Calibration) -> None:
        store = IncidentStore(self.state, keep=10)
        for one in calibrations:
            store.keep(PREFIX + one.key, to_json(one))
        store.close()


@pytest.fixture
def box(tmp_path: Path) -> Box:
    """One whose engine has started and was proved."""
    return Box(tmp_path)


def terms_of(said) -> dict:
    """Of --json, by name."""
    assert said.code == 0, said.err
    return {term["name"]: term for term in json.loads(said.out)["terms"]}


def test_without_a_model_the_plan_is_about_what_the_box_serves(ctl, box: Box) -> None:
    """Engine and model are known; weights, free memory and the proved peak are the measured ones, the pool is chosen anew."""
    said = ctl("--state-dir", box.state, "plan", "--json")
    terms = terms_of(said)
    assert (terms["weights"]["bytes"], terms["free at start"]["bytes"], terms["prefill peak"]["bytes"]) == (3 * GIB, 20 * GIB, 700 * MIB)
    assert terms["weights"]["source"] == "the start of 2026-11-30 07:00"
    assert terms["KV pool"]["bytes"] != GIB
    choice = json.loads(said.out)["choice"]
    assert choice["engine"] == "native"
    assert any("measured on this box with native 0.1.0" in words for words in choice["assumptions"])


@pytest.mark.parametrize("named", ["the folder", "its config.json", "a copy"])
def test_the_boxs_own_model_is_known_by_its_content(ctl, box: Box, tmp_path: Path, named: str) -> None:
    """Whatever its path."""
    copy = tmp_path / "elsewhere" / box.model.name
    copy.mkdir(parents=True)
    (copy / "config.json").write_bytes((box.model / "config.json").read_bytes())
    path = {"the folder": box.model, "its config.json": box.model / "config.json", "a copy": copy}[named]
    assert terms_of(ctl("--state-dir", box.state, "plan", "--model", path, "--json"))["weights"]["bytes"] == 3 * GIB


@pytest.mark.parametrize(
    "arguments",
    [["--unmeasured", "--engine", "native"], ["--gpu", "64GiB", "--engine", "native"], ["--gpu", "rtx3090", "--engine", "sglang"]],
)
def test_another_place_is_planned_without_them(ctl, box: Box, arguments: list[str]) -> None:
    """And whoever wants to know what a plan from nothing says."""
    terms = terms_of(ctl("--state-dir", box.state, "plan", "--model", box.model, *arguments, "--json"))
    assert "start of" not in terms["weights"]["source"]


def test_another_engine_or_model_does_not_get_them(ctl, box: Box) -> None:
    """A file that was replaced is another model."""
    config = json.loads((box.model / "config.json").read_text())
    (box.model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))
    terms = terms_of(ctl("--state-dir", box.state, "plan", "--model", box.model, "--engine", "native", "--json"))
    assert "start of" not in terms["weights"]["source"]


def test_what_a_person_gives_wins(ctl, box: Box) -> None:
    """--weights over the measured ones; the others stay measured."""
    terms = terms_of(ctl("--state-dir", box.state, "plan", "--weights", "1GiB", "--json"))
    assert (terms["weights"]["bytes"], terms["free at start"]["bytes"]) == (GIB, 20 * GIB)


def test_a_damaged_record_is_as_if_nothing_had_been_measured(ctl, box: Box) -> None:
    """Of another version, of wrong types, no database at all: the plan goes on without."""
    box.keep(replace(box.known, measured=Measured(weight_bytes="3"), engine_version="0.2.0", time_s=9.0))  # type: ignore[arg-type]
    assert terms_of(ctl("--state-dir", box.state, "plan", "--json"))["weights"]["bytes"] == 3 * GIB
    (box.state / "incidents.db").write_bytes(b"no database")
    assert "nothing was served" in ctl("--state-dir", box.state, "plan").err
    assert ctl("--state-dir", box.state, "plan", "--model", box.model, "--engine", "native", "--json").code == 0
