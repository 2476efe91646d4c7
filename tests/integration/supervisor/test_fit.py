"""An engine that does not fit driver or card, on a box whose NVML says that it has RTX 3090s."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.backends import backend_of
from appliance.config.schema import Config, EngineTable, ModelTable
from appliance.core.states import EngineState
from appliance.planner.gpus import gpu_facts
from appliance.supervisor import fits_card
from tests.fakes.cards import HAS_COMPILER
from tests.integration.engines import double
from tests.integration.supervisor.test_cards import CardBox, reach

pytestmark = pytest.mark.skipif(not HAS_COMPILER, reason="no gcc to build a libnvidia-ml with")


def sglang(folder: Path, cuda: str, **model: object) -> dict[str, object]:
    """Tables for an SGLang whose environment has a CUDA runtime of that version."""
    double("sglang", "0.5.23", folder)
    (folder / f"env/lib/python3.11/site-packages/nvidia_cuda_runtime-{cuda}.dist-info").mkdir()
    (folder / "demo/config.json").write_text(json.dumps({"max_position_embeddings": 4096, **model}))
    return {
        "engine": EngineTable(backend="sglang", python=str(folder / "env/bin/python")),
        "model": ModelTable(path=str(folder / "demo")),
    }


async def test_driver_535_with_cuda_13_is_parked_by_name(tmp_path: Path) -> None:
    """Before anything is started: which package, what it needs, what is here, what to do."""
    box = CardBox(tmp_path, cards=2, nodes=True)
    box.tables = sglang(tmp_path / "sglang", "13.0.96")
    (box.roots.proc / "driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 2024")
    async with box.supervising() as supervisor:
        await reach(supervisor, EngineState.PARKED)
        reason = supervisor.board.current.reason
        assert "sglang 0.5.23 brings CUDA 13.0 (nvidia-cuda-runtime 13.0.96), which needs driver 580.65.06 or newer" in reason
        assert "this machine has 535.183.01: upgrade the driver" in reason
        assert supervisor.life is None


def test_weights_in_8_bits_on_a_3090_are_a_note(tmp_path: Path) -> None:
    """It starts, and its owner is told what the card makes of them; a driver that fits says nothing."""
    config = replace(Config(), **sglang(tmp_path / "sglang", "13.0.96", quantization_config={"quant_method": "fp8"}))  # type: ignore[arg-type]
    backend = backend_of(config)
    spec = backend.launch_spec(config, backend.first_rung(config), 1, tmp_path)
    proc = tmp_path / "proc/driver/nvidia"
    proc.mkdir(parents=True)
    (proc / "version").write_text("NVRM version: 595.45.04")
    checked = fits_card.checked(spec, backend, config, gpu_facts("rtx3090"), tmp_path / "proc")
    (note,) = set(checked.notes) - set(spec.notes)
    assert "8-bit floats (fp8)" in note
    assert "sm_86" in note
    assert fits_card.checked(spec, backend, config, None, tmp_path / "proc") == spec
