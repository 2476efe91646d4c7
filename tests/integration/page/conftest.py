"""A headless Chromium for the page's tests, started once; and pages in it that report what goes wrong in them."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

START_S = 60.0
EXPECTED = ("Failed to load resource", "net::ERR_")
"""The browser's own words for an answer of 401 or a gateway that is away, which tests bring about."""


class Tab:
    """A page, and what its console said."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.errors: list[str] = []
        page.on("console", lambda message: message.type in ("error", "warning") and self.errors.append(message.text))
        page.on("pageerror", lambda error: self.errors.append(f"uncaught: {error}"))

    @property
    def faults(self) -> list[str]:
        """Errors that no test asked for."""
        return [error for error in self.errors if not any(words in error for words in EXPECTED)]

    async def shows(self, selector: str, text: str, timeout_s: float = 15.0) -> None:
        """Wait until an element's text contains this."""
        wanted = "([selector, text]) => document.querySelector(selector)?.textContent.toLowerCase().includes(text.toLowerCase())"
        try:
            await self.page.wait_for_function(wanted, arg=[selector, text], timeout=timeout_s * 1000)
        except Exception as error:
            if type(error).__name__ != "TimeoutError":
                raise
            found = await self.page.text_content(selector)
            raise AssertionError(
                f"{selector} does not show {text!r} within {timeout_s:g} s but {found!r}; console: {self.errors}"
            ) from None


NewTab = Callable[..., AbstractAsyncContextManager[Tab]]


@pytest.fixture(scope="session")
def chromium() -> Iterator[str]:
    """The address of its debugging port."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("NOT CHECKED: the page in a browser; apt-get install chromium")
    profile = tempfile.mkdtemp(prefix="chromium-")
    log = Path(profile) / "log"
    command = [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, f"--user-data-dir={profile}", "about:blank"], stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield _address(log, process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(profile, ignore_errors=True)


def _address(log: Path, process: subprocess.Popen[bytes]) -> str:
    due_s = time.monotonic() + START_S
    while (found := re.search(r"DevTools listening on ws://([\d.]+:\d+)/", log.read_text(errors="replace"))) is None:
        assert process.poll() is None and time.monotonic() < due_s, f"chromium does not start: {log.read_text(errors='replace')[-2000:]}"
        time.sleep(0.05)
    return f"http://{found[1]}"


@pytest.fixture
def new_tab(chromium: str) -> NewTab:
    """`async with new_tab(color_scheme="dark") as tab`: a window without a past."""
    playwright_api = pytest.importorskip("playwright.async_api", reason="NOT CHECKED: the page in a browser; pip install playwright")

    @contextlib.asynccontextmanager
    async def tab(**options: Any) -> AsyncIterator[Tab]:
        async with playwright_api.async_playwright() as playwright:
            browser = await playwright.chromium.connect_over_cdp(chromium)
            context = await browser.new_context(**options)
            try:
                yield Tab(await context.new_page())
            finally:
                await context.close()

    return tab


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Short, for sockets."""
    path = Path(tempfile.mkdtemp(prefix="page-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)
