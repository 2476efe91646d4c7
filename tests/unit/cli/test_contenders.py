"""bench --engine: who may stand, whom it makes room for, and what the numbers recommend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from appliance.cli import contenders
from appliance.cli.contenders import contender, recommended
from appliance.cli.place import Place
from appliance.config.runtimes import put_in_force
from appliance.config.schema import Config, EngineTable, ModelTable
from appliance.core.errors import ApplianceError
from tests.integration.engines import double
from tests.unit.cli.conftest import Applianced, Ctl
from tests.unit.cli.test_runtimes import _made as make_runtime


def result(engine: str, speed: float, first_s: float = 1.0, **changes: Any) -> dict[str, Any]:
    """Of one engine."""
    about = {"engine": engine, "failed": 0, "restarts": 0, "answer_tokens_per_s": speed, "time_to_first_token_s": {"p95": first_s}}
    return about | changes


@pytest.mark.parametrize(
    ("results", "best", "words"),
    [
        ([result("a", 100), result("b", 60)], "a", "a: 100.0 tokens/s against 60.0 tokens/s of b"),
        ([result("b", 60), result("a", 100)], "a", "a: 100.0 tokens/s against 60.0 tokens/s of b"),
        ([result("a", 100, 2.0), result("b", 95, 0.5)], "b", "b: 0.50 s to the first token (P95) against 2.00 s of a"),
        ([result("a", 100, 2.0), result("b", 95, 0.5), result("c", 40, 0.1)], "b", "against 2.00 s of a"),
        ([result("a", 900, failed=1), result("b", 5)], "b", "it alone answered every request without a restart; a failed"),
        ([result("a", 900, restarts=1), result("b", 5), result("c", 50)], "c", "of b; a failed"),
        ([{"engine": "a", "error": "x"}, result("b", 5, failed=2)], "", "none answered every request"),
    ],
)
def test_the_numbers_recommend(results: list[dict[str, Any]], best: str, words: str) -> None:
    """Who answered everything, then who is clearly faster, then whose first token comes sooner; with the numbers in the sentence."""
    name, sentence = recommended(results)
    assert name == best
    assert words in sentence


def test_a_contender_is_an_engine_or_a_runtime(tmp_path: Path) -> None:
    """The runtime in force or the one that is named; settings of another engine do not go along."""
    put_in_force(make_runtime(tmp_path, "sglang-2.0", "python"))
    make_runtime(tmp_path, "sglang-1.0", "python")
    config = Config(model=ModelTable("/m"), engine=EngineTable(backend="sglang", kv_dtype="fp8_e4m3"))
    assert contender("sglang", config, tmp_path).settings[1] == f"engine.python={tmp_path}/runtimes/sglang-2.0/bin/python"
    older = contender("sglang-1.0", config, tmp_path)
    assert (older.backend, older.model, older.settings[1:]) == (
        "sglang",
        "/m",
        (f"engine.python={tmp_path}/runtimes/sglang-1.0/bin/python",),
    )
    other = contender("llamacpp=/x.gguf", config, tmp_path)
    assert (other.model, "engine.kv_dtype=auto" in other.settings) == ("/x.gguf", True)
    for words in ("sglang-3.0", "ollama", "..", "", "current-sglang/../x"):
        with pytest.raises(ApplianceError, match="no engine and no runtime"):
            contender(words, config, tmp_path)
    with pytest.raises(ApplianceError, match="has no model to serve"):
        contender("vllm", Config(), tmp_path)


def test_one_that_serves_is_asked_first(applianced: Applianced) -> None:
    """It is drained only where somebody agreed, and serves again afterwards, also when the comparison fails."""
    place = Place(run_dir=applianced.run_dir)
    applianced.answers["status"] = {"state": "serving"}
    with pytest.raises(ApplianceError, match="--yes drains it first"), contenders.box_out_of_the_way(place, agreed=False, deadline_s=1):
        pytest.fail("it serves")
    assert [verb for verb, _ in applianced.asked] == ["status"]
    with pytest.raises(ApplianceError, match="has not drained"), contenders.box_out_of_the_way(place, agreed=True, deadline_s=0):
        pytest.fail("it still serves")
    assert [verb for verb, _ in applianced.asked[1:]] == ["status", "drain", "status", "resume"]
    applianced.answers["status"] = {"state": "parked"}
    with contenders.box_out_of_the_way(place, agreed=False, deadline_s=1):
        assert applianced.asked[-1][0] == "status"
    assert applianced.asked[-1][0] == "status"


def test_engines_take_their_turns(ctl: Ctl, tmp_path: Path) -> None:
    """Each is started, measured and stopped; one that cannot serve is a row with the reason, and no winner."""
    engine = double("sglang", "0.5.17", tmp_path)
    words = [word for setting in engine.settings for word in ("--set", setting)]
    said = ctl(
        *("--state-dir", tmp_path / "state", "bench", "--engine", f"sglang={engine.model}", "--engine", "llamacpp=/nowhere.gguf"),
        *("--requests", "4", "--concurrency", "2", "--prompt-tokens", "20", "--answer-tokens", "5", "--json", *words),
    )
    found = json.loads(said.out)
    first, second = found["results"]
    assert (said.code, found["recommended"]) == (0, "sglang"), said.err
    assert (first["requests"], first["failed"], first["restarts"], first["answer_tokens"]) == (4, 0, 0, 20)
    assert first["ready_s"] > 0
    assert "/nowhere.gguf does not exist" in second["error"]
    assert "llamacpp failed" in found["reason"]


def test_what_measures_one_that_serves_does_not_go_with_it(ctl: Ctl) -> None:
    """--url with --engine, and a span that is none."""
    assert "--engine starts what it measures" in ctl("bench", "--engine", "native", "--url", "http://127.0.0.1:9").err
    assert "is no duration" in ctl("bench", "--from-traffic", "week").err
