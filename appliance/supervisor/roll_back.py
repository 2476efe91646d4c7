"""Putting the engine's last good environment in force again."""

from __future__ import annotations

import structlog

from appliance.config.runtimes import go_back

log = structlog.get_logger()


def go_back_to(configured_python: str, runtime: str) -> None:
    """What cannot be gone back to is said; the next start then fails as this one did, within the budget of starts."""
    try:
        go_back(configured_python, runtime)
    except OSError as error:
        log.error("the runtime cannot be gone back to", runtime=runtime, error=str(error))
