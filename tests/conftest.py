"""What every test may use."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")
"""Before Triton is imported anywhere in this process, by whichever test file comes first: kernels run in its interpreter here, but
under ttsem (tests/kernels/test_ttsem.py)."""


def pytest_configure() -> None:
    """Signals as a login shell would leave them: what nohup, `&` in a script or CI ignores, every child would ignore as well."""
    for name in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(name, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run each `async def` test on an asyncio loop of its own: as in production, and no plugin needed."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj) or pyfuncitem.get_closest_marker("anyio"):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
