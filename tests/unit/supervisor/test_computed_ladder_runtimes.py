"""The last step against a fault in software: the runtime before."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from appliance.backends import backend_of
from appliance.config.runtimes import put_in_force
from appliance.core.action import ActionKind
from appliance.core.causes import Cause
from appliance.supervisor.history import Phase
from appliance.supervisor.ladder import started_from
from appliance.supervisor.policy import decide
from appliance.supervisor.settings import MachineSettings
from tests.unit.supervisor.computed import Story, article
from tests.unit.supervisor.machine_cases import make_diagnosis, make_failure


def runtimes(folder: Path, *versions: str) -> str:
    """SGLang's environments of these versions, the first one in force; the interpreter as applianced fills it in."""
    for version in versions:
        runtime = folder / "runtimes" / f"sglang-{version}"
        (runtime / "bin").mkdir(parents=True)
        (runtime / "bin/python").write_text("#!/bin/sh\n")
        libraries = runtime / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
        (libraries / f"sglang-{version}.dist-info").mkdir(parents=True)
    put_in_force(folder / "runtimes" / f"sglang-{versions[0]}")
    return str(folder / "runtimes/current-sglang/bin/python")


def test_the_last_step_of_a_fault_in_software_is_the_runtime_before(tmp_path: Path) -> None:
    """The newest of the older ones, in its own version's words; the link stays, so that rung 0 has the one in force; a start of it that
    fails is not taken for a new runtime's."""
    python = runtimes(tmp_path, "0.5.17", "0.5.9", "0.5.8", "0.5.23")
    config = article(tmp_path / "m", python=python, version="")
    story = Story(config, start_failures_max=9)
    for _ in range(6):
        story.fails(Cause.CUDA_ILLEGAL_ACCESS)
    assert "current_runtime" in story.rung.features_off
    (tmp_path / "m/tokenizer.json").write_text("{}")
    (tmp_path / "m/model.safetensors").touch()
    backend = backend_of(config)
    spec = backend.launch_spec(started_from(config, story.rung), story.rung, 9, tmp_path)
    assert (spec.runtime, "--cuda-graph-max-bs" in spec.argv) == ("sglang-0.5.9", True)
    first = backend.launch_spec(started_from(config, story.state.ladder[0]), story.state.ladder[0], 9, tmp_path)
    assert (first.runtime, "--cuda-graph-max-bs-decode" in first.argv) == ("sglang-0.5.17", True)
    history = replace(story.history, runtime="sglang-0.5.17")
    failure = make_failure(Phase.START, runtime="sglang-0.5.9")
    action = decide(make_diagnosis(Cause.CUDA_ILLEGAL_ACCESS), history, story.state.ladder, MachineSettings(), failure, offers=())
    assert action.kind is not ActionKind.ROLL_BACK


def test_without_an_older_runtime_there_is_none_to_go_back_to(tmp_path: Path) -> None:
    """Nor where the owner named the interpreter: the rung would be the same command, and is left out."""
    for python in (runtimes(tmp_path, "0.5.17"), str(tmp_path / "runtimes/sglang-0.5.17/bin/python"), "/opt/sglang/bin/python"):
        story = Story(article(tmp_path / "m", python=python), start_failures_max=9)
        offers = story.ladders.offers(story.rung, Cause.CUDA_ILLEGAL_ACCESS)
        assert offers
        assert not any("current_runtime" in rung.features_off for rung in offers)
