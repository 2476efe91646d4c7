"""The scripts for a card, without one: they say that nothing was measured; and a card's minutes are not spent on finding that they fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from tests.bench import _card_engine, gpu_kernels
from tests.engine.test_tiny_models import SIZES, save_checkpoint

ROOT = Path(__file__).parents[2]

no_card = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")


@no_card
@pytest.mark.parametrize("script", ["gpu_kernels", "gpu_refcount", "gpu_weight_holder"])
def test_without_a_card_nothing_was_measured(script: str) -> None:
    """In these words, with the reason, and neither as right nor as wrong."""
    ran = subprocess.run([sys.executable, ROOT / f"tests/bench/{script}.py"], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 77, ran.stderr
    assert ran.stdout.startswith("not measured: no CUDA device")


def test_every_case_is_right_in_a_rehearsal(capsys: pytest.CaptureFixture[str]) -> None:
    """Ours against float64, and torch's way once: all kernels, small."""
    with torch.inference_mode():
        assert gpu_kernels.kernels(gpu_kernels.Bench(rehearse=True), 0.0)
    lines = capsys.readouterr().out.splitlines()[1:]
    assert {line.split()[0] for line in lines} == {"rms_norm", "rope", "gated_mlp", "sample", "kv_write", "paged_decode", "paged_prefill"}


def test_a_kernel_that_is_wrong_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """By its line, and by the answer; also one that leaves half of the values unwritten."""
    plan_write = gpu_kernels.OnCard.plan_write

    def half(self, slots, owners, guard, cache):  # type: ignore[no-untyped-def]
        write = plan_write(self, slots, owners, guard, cache)
        return lambda k, v, k_cache, v_cache: write(k, k, k_cache, v_cache)

    monkeypatch.setattr(gpu_kernels.OnCard, "rms_norm", staticmethod(lambda x, weight, epsilon: x))
    monkeypatch.setattr(gpu_kernels.OnCard, "plan_write", half)
    for cases in ("decode_cases", "prefill_cases"):
        monkeypatch.setattr(gpu_kernels, cases, lambda bench: iter(()))
    with torch.inference_mode():
        assert not gpu_kernels.kernels(gpu_kernels.Bench(rehearse=True), 0.0)
    wrong = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.endswith("WRONG")]
    assert wrong == ["rms_norm", "kv_write"]


def test_the_engine_is_rehearsed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a spoiled table: refused, and the same text; what the process says when it fails, and that it may not take for ever."""
    save_checkpoint(transformers.LlamaConfig(**SIZES), tmp_path)
    assert _card_engine.engine_trouble(tmp_path, "interpreter", "damaged") == ""
    assert "does not exist" in _card_engine.engine_trouble(tmp_path / "none", "interpreter")
    monkeypatch.setattr(_card_engine, "ENGINE_DEADLINE_S", 0.1)
    assert _card_engine.engine_trouble(tmp_path, "interpreter") == "it did not end within 0.1 s"
