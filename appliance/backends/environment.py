"""The environment of an engine process: complete, and nothing in it that we did not choose."""

from __future__ import annotations

import os

_KEPT = ("HOME", "TMPDIR", "TZ", "CUDA_VISIBLE_DEVICES")
"""TZ: engines write local time into their logs. HOME, TMPDIR: where compilers and caches go."""


def engine_environment() -> dict[str, str]:
    """PYTHONSAFEPATH: a file called torch.py in the working directory is not to be imported. Unbuffered: the last words count."""
    chosen = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LANG": "C.UTF-8",
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
    }
    return chosen | {name: os.environ[name] for name in _KEPT if name in os.environ}
