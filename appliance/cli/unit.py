"""The unit that systemd keeps, where applianced itself does not answer."""

from __future__ import annotations

import subprocess

from appliance.core.errors import ApplianceError, NotPermitted

UNIT = "llm-appliance.service"


def has_failed() -> bool:
    """Whether systemd has given it up (a start limit, or an exit code that forbids a restart)."""
    try:
        return subprocess.run(["systemctl", "is-failed", "--quiet", UNIT], stderr=subprocess.DEVNULL, check=False).returncode == 0
    except OSError:  # no systemd on this machine
        return False


def start_again() -> None:
    """Clear the count of failures, without which systemd refuses, and start it.

    Raises:
        NotPermitted: only root may, or whoever polkit allows.
        ApplianceError: it does not start.
    """
    for words in (["reset-failed", UNIT], ["start", UNIT]):
        ended = subprocess.run(["systemctl", *words], capture_output=True, text=True, check=False)
        if ended.returncode != 0:
            said = " ".join(ended.stderr.split())
            if "denied" in said or "authentication" in said:
                raise NotPermitted(f"systemctl {' '.join(words)}: {said}", hint="run as root")
            raise ApplianceError(f"systemctl {' '.join(words)}: {said}", hint=f"journalctl -u {UNIT} says why")
