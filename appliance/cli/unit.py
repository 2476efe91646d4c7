"""The unit that systemd keeps, where applianced itself does not answer."""

from __future__ import annotations

import subprocess

from appliance.core.errors import ApplianceError, NotPermitted, Unreachable

UNIT = "llm-appliance.service"
_ASKED = ("LoadState", "ActiveState", "SubState", "Result", "StatusText")


def has_failed() -> bool:
    """Whether systemd has given it up (a start limit, or an exit code that forbids a restart)."""
    try:
        return subprocess.run(["systemctl", "is-failed", "--quiet", UNIT], stderr=subprocess.DEVNULL, check=False).returncode == 0
    except OSError:  # no systemd on this machine
        return False


def why_absent() -> Unreachable | None:
    """What systemd says of an applianced that does not answer; None where it has nothing to say, or the unit is not there."""
    try:
        said = subprocess.run(["systemctl", "show", f"--property={','.join(_ASKED)}", UNIT], capture_output=True, text=True, check=False)
    except OSError:
        return None
    facts = dict(line.split("=", 1) for line in said.stdout.splitlines() if "=" in line)
    if said.returncode != 0 or facts.get("LoadState") != "loaded":
        return None
    last = f"; its last words: {facts['StatusText']}" if facts.get("StatusText") else ""
    match facts.get("ActiveState"), facts.get("SubState"):
        case "failed", _:
            reason = f"{UNIT} has failed, and systemd has given it up ({facts.get('Result')}){last}"
            return Unreachable(reason, hint=f"`journalctl -u {UNIT} -n 20` says why; mend that, then `appliancectl resume`")
        case _, "auto-restart":
            reason = f"{UNIT} has ended ({facts.get('Result')}) and is started again in a moment{last}"
            return Unreachable(reason, hint=f"`journalctl -u {UNIT} -n 20` says why")
        case "inactive", _:
            return Unreachable(f"{UNIT} is stopped", hint="`systemctl start llm-appliance` starts it")
    return None


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
