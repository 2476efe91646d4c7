"""`python -m appliance.card_settings`: persistence mode, and the power limit of appliance.toml, on every card. Run as root at boot."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence

from appliance.config import Config, load_config
from appliance.config.load import DEFAULT_PATH
from appliance.core.errors import ApplianceError


def commands(config: Config) -> Iterator[Sequence[str]]:
    """What is to be run. Persistence mode first: without it the driver may forget the limit as soon as nobody has the card open."""
    yield ("nvidia-smi", "-pm", "1")
    if config.gpu.power_limit_w:
        yield ("nvidia-smi", "-pl", f"{config.gpu.power_limit_w:g}")


def main() -> int:
    """Exit code 1 when one of them failed; the others are tried all the same."""
    try:
        config = load_config(DEFAULT_PATH if DEFAULT_PATH.exists() else None).config
    except ApplianceError as error:
        print(f"the configuration cannot be used: {error}", file=sys.stderr)
        return 1
    return max([_run(command) for command in commands(config)])


def _run(command: Sequence[str]) -> int:
    print(" ".join(command), flush=True)
    try:
        return min(1, subprocess.run(command, check=False).returncode)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}; it comes with the driver (package nvidia-smi)", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
