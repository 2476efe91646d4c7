"""The package is installed by apt on a machine without a network, a GPU or an engine, and taken away again."""

from __future__ import annotations

import pytest

from tests.system.machine import SUPERVISOR, Machine
from tests.system.rack import Installed

pytestmark = pytest.mark.system


def test_three_commands_to_a_chat_answer(installed: Installed) -> None:
    """apt install, setup --demo, systemctl start: the model answers."""
    print({name: round(value, 1) for name, value in installed.seconds.items()})
    assert "Paris" in installed.answer


def test_it_serves_after_a_reboot(machine: Machine) -> None:
    """The units are enabled: a machine that boots serves without anybody."""
    assert machine.property(SUPERVISOR, "NRestarts") == "0"
    assert machine.property(SUPERVISOR, "ActiveState") == "active"
    assert machine.http("/health")[0] == 200
