"""Our errors. Each owns its sentence: what, the value, the limit, what to change (house style rule 5).

* ApplianceError
  + ConfigError              a key of appliance.toml (appliance/config)
  + ModelError               a model folder that cannot be served
  + BudgetError              a plan that cannot run
  + ControlError             the control socket
    - Unreachable            nobody listens there (exit code 3)
    - NotPermitted           we may not talk to it (exit code 4)

Where a module has finer ones, they live there as subclasses.
"""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """Exit codes of every verb of appliancectl."""

    OK = 0
    BAD = 1
    """The thing asked about is bad: diagnose found a crash, doctor a fault, config check an error."""
    USAGE = 2
    UNREACHABLE = 3
    """applianced cannot be reached."""
    NOT_PERMITTED = 4


class ApplianceError(Exception):
    """Base of every error that we raise on purpose; `hint` says what to change."""

    exit_code: ExitCode = ExitCode.BAD

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


class ConfigError(ApplianceError):
    """A key of the configuration is wrong; the message names its path, the value and the nearest or legal one."""


class ModelError(ApplianceError):
    """A model folder is missing, half-written, or of a kind that the engine cannot serve."""


class BudgetError(ApplianceError):
    """The plan cannot run on this memory."""


class ControlError(ApplianceError):
    """The control socket answered something that we cannot use."""


class Unreachable(ControlError):
    """Nobody listens on the control socket."""

    exit_code = ExitCode.UNREACHABLE


class NotPermitted(ControlError):
    """The control socket refuses us."""

    exit_code = ExitCode.NOT_PERMITTED
