"""The soak finds what is planted, and passes where nothing is; `appliancectl stress` says so in words, data and its exit code."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from appliance.engine import stress
from appliance.engine.stress import draw_round
from tests.engine.test_tiny_models import SIZES, save_checkpoint

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that fits 8-bit weights."""
    return save_checkpoint(transformers.LlamaConfig(**(SIZES | {"intermediate_size": 192})), tmp_path_factory.mktemp("tiny"))


def soak(model: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, dict[str, object], str]:
    """Some rounds in this process: exit code, report, words."""
    capsys.readouterr()
    code = stress.main(["--model", str(model), "--seconds", "1", "--threads", "2", *more])
    said = capsys.readouterr()
    return code, json.loads(said.out) if said.out else {}, said.err


def test_a_sound_engine_passes_under_pressure(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With everything that the soak is for: preemptions, answers set aside, evictions, clients that leave, comparisons."""
    code, report, words = soak(tiny, capsys, "--weights-dtype", "int8")
    assert code == 0, words
    assert report["passed"]
    assert words.splitlines()[-1].startswith("passed: ")
    for what in ("rounds", "requests", "tokens", "aborted", "compared", "preemptions", "swaps", "evictions", "cached_tokens"):
        assert report[what], what


@pytest.mark.parametrize("fault", ["stray", "overrun"])
def test_planted_damage_is_found(fault: str, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A refused access, or a write behind the region's end: the round is named, and the exit code says it."""
    code, report, words = soak(tiny, capsys, "--fault", f"{fault}@40")
    assert code == 1
    assert not report["passed"]
    (first, *_) = report["faults"]  # type: ignore[misc]
    assert first.startswith("round ")
    assert ("KV blocks were refused" in first) or ("was written" in first)
    assert f"FAILED after {report['rounds']} rounds: {first}" in words


def test_an_answer_that_changes_is_found(tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One token of one answer, once."""
    from appliance.engine import loop

    chosen = loop.EngineLoop._accept
    turns = iter(range(10**9))

    def other(self, logits, sequences):  # type: ignore[no-untyped-def]
        if next(turns) == 90:
            logits = logits.flip(-1)
        return chosen(self, logits, sequences)

    monkeypatch.setattr(loop.EngineLoop, "_accept", other)
    code, report, _ = soak(tiny, capsys)
    assert code == 1
    assert "gave" in str(report["faults"])


@pytest.mark.parametrize(("count", "words"), [("_anonymous_bytes", "the process"), ("_card_bytes", "its memory on the card")])
def test_memory_that_is_not_given_back_is_found(
    count: str, words: str, tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the process or of a card, beyond 64 MiB since the first rounds, with the number."""
    grown = iter((5 * 1024**2, 5 * 1024**2 + stress.MOST_GROWTH_BYTES + 1))
    monkeypatch.setattr(stress, count, lambda: next(grown))
    code, report, _ = soak(tiny, capsys)
    assert code == 1
    assert report["faults"] == [f"{words} grew by {stress.MOST_GROWTH_BYTES + 1} bytes after its first 3 rounds"]


def test_a_model_that_is_not_there_is_no_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and the engine's own sentence."""
    code, report, words = soak(tmp_path / "nothing", capsys)
    assert (code, report) == (2, {})
    assert "does not exist" in words


def test_the_same_seed_draws_the_same_requests() -> None:
    """So that a failure can be had again; every shape is among them."""
    draws = random.Random(7), random.Random(7)
    one, other = ([draw_round(draw, number, 300) for number in range(40)] for draw in draws)
    assert one == other
    asked = [request for drawn in one for request in drawn]
    assert any(request.leaves_after for request in asked)
    assert {request.request.sampling.temperature == 0.0 for request in asked} == {True, False}


def test_the_verb_starts_it_and_passes_its_verdict_on(tiny: Path) -> None:
    """As installed: words for people, data for programs, 1 where something was found."""
    command = [sys.executable, "-m", "appliance.cli", "stress", "--hours", "0.0001", "--set", f"model.path={tiny}"]
    ended = subprocess.run([*command, "--json"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["passed"]
    wrong = subprocess.run([*command, "--set", "engine.backend=vllm"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert wrong.returncode == 1
    assert "stress is for the built-in engine" in wrong.stderr
