"""What the built-in engine finds wrong in its own KV cache reaches the owner: with the engine alive, and as the reason of its end."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.supervisor.harness import Applianced, wait_for
from tests.integration.supervisor.test_own_findings import NATIVE, model_folder

Start = Callable[..., Applianced]
LONG = {"text": "The cat sat on the mat, and the dog", "sampling_params": {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True}}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer."""
    return model_folder(tmp_path_factory.mktemp("tiny"))


def damaged(applianced: Start, model: Path, fault: str) -> Applianced:
    """Serving; the proof's two tokens are one decode step, and the damage is done in the fifth."""
    settings = NATIVE | {"model.path": str(model), "engine.kv_pool_bytes": "16MiB", "engine.extra_args": json.dumps(["--fault", fault])}
    one = applianced(settings=settings)
    wait_for(lambda: one.status().get("state") == "serving", "the real engine serves", 90)
    return one


def test_a_refused_access_is_an_incident_though_the_engine_goes_on(applianced: Start, tiny: Path) -> None:
    """The client gets its whole answer from the same life; the incident has the engine's line, with its reason, and what to do."""
    one = damaged(applianced, tiny, "freed@5")
    answer = one.engine("/generate", LONG, timeout_s=30)
    assert len(answer["output_ids"]) == 24
    (incident,) = one.wait_incident()
    whole: dict[str, Any] = one.ask("incident", id=incident["incident_id"])["incident"]
    assert (whole["diagnosis"]["cause"], whole["action"]["kind"], whole["phase"]) == ("ok_degraded", "none", "serving")
    assert "reason=not_open" in whole["diagnosis"]["root"]["text"]
    assert "2 accesses to KV blocks" in whole["diagnosis"]["sentence"]
    assert whole["diagnosis"]["remedies"]
    assert whole["action"]["basis"].startswith("went on because the engine refused 2 accesses")
    assert any("KV access refused" in line["text"] for line in whole["evidence"])
    assert whole["recovered_s"] == 0.0
    status = one.status()
    assert (status["generation"], status["restarts"], status["state"]) == (1, 0, "serving")
    assert status["last_incident"]["incident_id"] == incident["incident_id"]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("overrun", r"CacheCorrupt: the block between the regions was written, first in the values of layer 0 \(block=\d+\)"),
        ("leaked", r"PoolCorrupt: KV blocks of the decode region do not add up: \d+ free \+ 0 held \+ 0 kept != \d+, 1 marked as held"),
    ],
)
def test_what_is_wrong_when_nothing_runs_ends_the_engine_with_the_numbers_in_its_incident(
    fault: str, words: str, applianced: Start, tiny: Path
) -> None:
    """A write between the regions, a block that was lost; the next life serves."""
    one = damaged(applianced, tiny, f"{fault}@5")
    with contextlib.suppress(OSError, http.client.HTTPException):  # it may end before its answer has left
        one.engine("/generate", LONG, timeout_s=30)
    (incident,) = one.wait_incident()
    whole: dict[str, Any] = one.ask("incident", id=incident["incident_id"])["incident"]
    assert re.search(words, whole["diagnosis"]["root"]["text"])
    assert whole["action"]["kind"] == "restart_same"
    wait_for(lambda: one.status().get("state") == "serving" and one.status()["generation"] == 2, "the next life serves", 90)
