"""apport: what a report about this package carries. No text of requests is in any of it, and secrets are taken out."""

import subprocess
import tempfile
from pathlib import Path

COMMANDS = {
    "ApplianceStatus": ["appliancectl", "status", "--json"],
    "ApplianceDiagnosis": ["appliancectl", "diagnose", "--markdown"],
    "ApplianceDoctor": ["appliancectl", "doctor"],
    "ApplianceConfig": ["appliancectl", "config", "show", "--changed"],
}


def add_info(report, _ui=None):
    """Called by apport."""
    for name, command in COMMANDS.items():
        report[name] = said(command)
    bundle = Path(tempfile.mkdtemp(prefix="llm-appliance-"), "bundle.tar.zst")
    words = said(["appliancectl", "diagnose", "--bundle", str(bundle)])
    report["ApplianceBundle"] = (str(bundle),) if bundle.exists() else words


def said(command):
    """What it printed; why it could not be run."""
    try:
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{' '.join(command)}: {error}"
    return ended.stdout
