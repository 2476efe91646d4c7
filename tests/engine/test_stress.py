"""The soak finds what is planted, and passes where nothing is; `appliancectl stress` says so in words, data and its exit code."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import transformers

from appliance.cli.models import DEMO_MODEL
from appliance.engine import stress
from appliance.engine.messages import FinishReason
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


@pytest.mark.parametrize(("fault", "words"), [("stray", "KV blocks were refused"), ("overrun", "was written"), ("leaked", "do not add up")])
def test_planted_damage_is_found(fault: str, words: str, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A refused access, a write behind the region's end, a lost block: the round is named, and the exit code says it."""
    code, report, said = soak(tiny, capsys, "--fault", f"{fault}@40")
    assert code == 1
    assert not report["passed"]
    (first, *_) = report["faults"]  # type: ignore[misc]
    assert first.startswith("round ")
    assert words in first
    assert f"FAILED after {report['rounds']} rounds: {first}" in said


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


def test_the_request_that_is_asked_in_every_round_is_held_to_its_first_answer(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where what is asked by itself agrees with itself."""
    alone = stress.Stress._alone
    monkeypatch.setattr(stress.Stress, "_alone", lambda self, name, *asked: alone(self, name, *asked)[: -1 if name == "probe" else None])
    code, report, _ = soak(tiny, capsys)
    assert code == 1
    assert "round 1: the same request gave" in str(report["faults"])


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [("kv_blocks_used", 3, "3 blocks, 0 running"), ("running", 1, "0 blocks, 1 running"), ("waiting", 2, "0 running and 2 waiting")],
)
def test_what_is_left_when_nothing_runs_is_found(
    field: str, value: int, words: str, tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block, or a sequence, of which the engine's own numbers say that it is still there."""
    from appliance.engine.loop import EngineLoop

    stats = EngineLoop.stats
    monkeypatch.setattr(EngineLoop, "stats", lambda loop: replace(stats(loop), **{field: value}))
    code, report, _ = soak(tiny, capsys)
    assert code == 1
    assert words in str(report["faults"])


def test_a_request_that_fails_is_found(tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever for: a prefill without memory, at last."""
    from appliance.engine.runner import ModelRunner

    prefill = ModelRunner.prefill

    def failing(self, chunks):  # type: ignore[no-untyped-def]
        if any(chunk.sequence.request.request_id == "1.0" for chunk in chunks):
            raise MemoryError
        return prefill(self, chunks)

    monkeypatch.setattr(ModelRunner, "prefill", failing)
    code, report, _ = soak(tiny, capsys)
    assert code == 1
    assert report["faults"] == [f"round 1: request 1.0 ended as {FinishReason.ERROR}"]


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


def test_the_verb_starts_it_and_passes_its_verdict_on(tiny: Path, tmp_path: Path) -> None:
    """As installed: words for people, data for programs, 1 where something was found."""
    command = [sys.executable, "-m", "appliance.cli", "stress", "--hours", "0.0001", "--set", f"model.path={tiny}"]
    python = tmp_path / "python"  # one whose engine is damaged
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@" --fault leaked@40\n')
    python.chmod(0o755)
    found = subprocess.run(
        [*command, "--set", f"engine.python={python}"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert found.returncode == 1, found.stderr
    assert "FAILED after" in found.stdout
    assert "do not add up" in found.stdout
    ended = subprocess.run([*command, "--json"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["passed"]
    wrong = subprocess.run([*command, "--set", "engine.backend=vllm"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert wrong.returncode == 1
    assert "stress is for the built-in engine" in wrong.stderr


def test_the_verb_takes_the_demo_model_where_none_is_named(tiny: Path, tmp_path: Path) -> None:
    """As after `make run`; and where there is none, it says how to bring it."""
    command = [sys.executable, "-m", "appliance.cli", "--state-dir", str(tmp_path), "stress", "--hours", "0.0001", "--json"]
    none = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert none.returncode == 1
    assert "setup --demo" in none.stderr
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / DEMO_MODEL).symlink_to(tiny)
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["passed"]
