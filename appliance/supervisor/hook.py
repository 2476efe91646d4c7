"""supervisor.on_park: tell somebody, once, in bounded time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

import structlog

HOOK_TIMEOUT_S = 30.0
REAP_POLL_S = 0.1

log = structlog.get_logger()


async def run_hook(command: tuple[str, ...]) -> None:
    """Run the owner's command; whatever becomes of it is logged and nothing more. What it leaves running has the same time."""
    null = asyncio.subprocess.DEVNULL
    try:
        # A group of its own, not a session: what is ours in another session is taken for the engine's orphan.
        child = await asyncio.create_subprocess_exec(*command, stdin=null, env=_environment(), process_group=0)
    except OSError as error:
        log.error("supervisor.on_park cannot be run", command=command[0], error=str(error))
        return
    try:
        async with asyncio.timeout(HOOK_TIMEOUT_S):
            if code := await child.wait():
                log.error("supervisor.on_park failed", command=command[0], code=code)
            await _until_reaped(child.pid)
    except TimeoutError:
        os.killpg(child.pid, signal.SIGKILL)  # somebody of it is not reaped, so its number is still its own
        log.error("supervisor.on_park took too long and was killed", command=command[0], timeout_s=HOOK_TIMEOUT_S)
        await child.wait()
        await _until_reaped(child.pid)


async def _until_reaped(group: int) -> None:
    """What the command left behind falls to us, who are its subreaper, and nobody else would take it off the kernel's list."""
    with contextlib.suppress(ChildProcessError):  # none is left
        while True:
            pid, _status = os.waitpid(-group, os.WNOHANG)  # noqa: ASYNC222 - it does not wait
            if not pid:
                await asyncio.sleep(REAP_POLL_S)


def _environment() -> dict[str, str]:
    """Ours without what is meant for our own interpreter: the hook may be a Python program."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
