"""A model folder without weights, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.model_folder import byte_level_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level_folder(tmp_path_factory.mktemp("byte-level"))
