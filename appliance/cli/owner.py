"""Doing things in the state folder as the user it belongs to: what root writes there, that user could turn against root."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from appliance.core.errors import ExitCode
from appliance.orphans import ends_with_us


def other_owner(state_dir: Path) -> os.stat_result | None:
    """Who owns the state folder, where we are root and somebody else does."""
    if os.geteuid() != 0 or not state_dir.is_dir():
        return None
    owner = state_dir.stat()
    return owner if owner.st_uid != 0 else None


def again_as(owner: os.stat_result, state_dir: Path, arguments: Sequence[str]) -> ExitCode:
    """appliancectl once more, as that user and about that folder; its exit code."""
    ended = subprocess.run(
        [sys.executable, "-m", "appliance.cli", "--state-dir", str(state_dir.absolute()), *arguments],
        user=owner.st_uid,
        group=owner.st_gid,
        extra_groups=[],
        umask=0o022,
        cwd="/",
        env=os.environ | {"HOME": str(state_dir)},
        check=False,
        preexec_fn=ends_with_us(),
    )
    return ExitCode(ended.returncode) if ended.returncode in tuple(ExitCode) else ExitCode.BAD
