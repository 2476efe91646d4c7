"""tests/system/real_sglang.sh, as far as it comes without a card: it says what is missing before it brings 16 GiB."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "system/real_sglang.sh"
SMI = "#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.'\nexit 9\n"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "usage: tests/system/real_sglang.sh MODEL [VERSION]"),
        (["a", "0.5.23", "c"], 2, "usage"),
        (["/nowhere"], 1, "there is no /nowhere/config.json: name the folder of a model"),
        (["{model}"], 1, "nvidia-smi tells of none: NVIDIA-SMI has failed"),
    ],
)
def test_it_says_what_is_missing(tmp_path: Path, words: list[str], code: int, said: str) -> None:
    """Words, model, driver: in this order, and nothing is made."""
    (tmp_path / "config.json").write_text("{}")
    smi = tmp_path / "bin/nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(SMI)
    smi.chmod(0o755)
    environment = {"PATH": f"{smi.parent}:{os.environ['PATH']}"}
    command = [str(SCRIPT), *(word.format(model=tmp_path) for word in words)]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (code, "")
    assert said in ended.stderr
