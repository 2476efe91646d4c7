"""supervisor.on_park: tell somebody, once, in bounded time."""

from __future__ import annotations

import asyncio
import os

import structlog

HOOK_TIMEOUT_S = 30.0

log = structlog.get_logger()


async def run_hook(command: tuple[str, ...]) -> None:
    """Run the owner's command; whatever becomes of it is logged and nothing more."""
    try:
        child = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL, env=_environment())
    except OSError as error:
        log.error("supervisor.on_park cannot be run", command=command[0], error=str(error))
        return
    try:
        async with asyncio.timeout(HOOK_TIMEOUT_S):
            code = await child.wait()
            if code:
                log.error("supervisor.on_park failed", command=command[0], code=code)
    except TimeoutError:
        child.kill()
        log.error("supervisor.on_park took too long and was killed", command=command[0], timeout_s=HOOK_TIMEOUT_S)


def _environment() -> dict[str, str]:
    """Ours without what is meant for our own interpreter: the hook may be a Python program."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
