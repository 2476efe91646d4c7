"""Running appliancectl in this process, as its entry point does."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from appliance.cli.__main__ import run


@dataclass(frozen=True)
class Said:
    """What a command line came to."""

    code: int
    out: str
    err: str


Ctl = Callable[..., Said]


@pytest.fixture
def ctl(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ctl:
    """appliancectl for a user without a home of note: nothing of this machine's own appliance is seen or touched."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg-state"))
    monkeypatch.delenv("LLM_APPLIANCE_CONFIG", raising=False)

    def call(*arguments: str | Path) -> Said:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return Said(code, said.out, said.err)

    return call
