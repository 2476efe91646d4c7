"""apport: what a report about this package carries. No text of requests is in any of it."""

import subprocess

COMMANDS = {
    "ApplianceStatus": ["appliancectl", "status", "--json"],
    "ApplianceDiagnosis": ["appliancectl", "diagnose", "--markdown"],
    "ApplianceDoctor": ["appliancectl", "doctor"],
    "ApplianceConfig": ["appliancectl", "config", "show", "--changed"],
}


def add_info(report, _ui=None):
    """Called by apport."""
    for name, command in COMMANDS.items():
        try:
            ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            report[name] = f"{' '.join(command)}: {error}"
        else:
            report[name] = ended.stdout
