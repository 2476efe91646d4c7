"""One process at a time works on a folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from appliance.core.errors import ApplianceError


@contextlib.contextmanager
def only_one(path: Path, what: str) -> Iterator[None]:
    """Hold a lock on this file. It ends with the process, however that ends; the file stays.

    Raises:
        ApplianceError: another process holds it.
    """
    with path.open("a+") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            holder = handle.read().strip() or "unknown"
            raise ApplianceError(f"{what} is running in another process (pid {holder})", hint="wait until it has finished") from None
        handle.truncate(0)
        handle.write(str(os.getpid()))
        handle.flush()
        yield
