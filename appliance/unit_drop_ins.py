"""`python -m appliance.unit_drop_ins DIR`: what of appliance.toml belongs to systemd, as drop-ins of our units.

Run by a systemd generator, at boot and at each daemon-reload: no network, no other service, nothing but the configuration. What is
wrong with that is left to those who report it better: the units keep their defaults, and the gateway says what it is.
"""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Iterator
from pathlib import Path

from appliance.config import Config, load_config
from appliance.config.load import DEFAULT_PATH
from appliance.core.errors import ApplianceError

_MARGIN_S = 15
"""From the end of a drain to the SIGKILL that should never come; the units' own numbers are the defaults plus this."""


def drop_ins(config: Config) -> Iterator[tuple[str, str]]:
    """Unit and text, where the configuration differs from what the unit says by itself.

    Raises:
        ApplianceError: an address that systemd cannot hold: it resolves no names, and port 0 is no port.
    """
    default, gateway = Config(), config.gateway
    if (gateway.host, gateway.port) != (default.gateway.host, default.gateway.port):
        # An address of this machine may come up later than the socket. The empty line forgets the unit's own.
        text = f"ListenStream=\nListenStream={_listen_stream(gateway.host, gateway.port)}\nFreeBind=yes\n"
        yield "llm-appliance-gateway.socket", f"# gateway.host, gateway.port\n[Socket]\n{text}"
    if gateway.drain_s > default.gateway.drain_s:
        yield "llm-appliance-gateway.service", f"# gateway.drain_s\n[Service]\nTimeoutStopSec={gateway.drain_s + _MARGIN_S:g}\n"
    deadline_s = config.supervisor.stop_deadline_s
    if deadline_s > default.supervisor.stop_deadline_s:
        yield "llm-appliance.service", f"# supervisor.stop_deadline_s\n[Service]\nTimeoutStopSec={deadline_s + 2 * _MARGIN_S:g}\n"


def _listen_stream(host: str, port: int) -> str:
    if port == 0:
        raise ApplianceError("gateway.port = 0 names no port that systemd could hold", hint="choose one from 1 to 65535")
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        raise ApplianceError(f"gateway.host = {host!r} is no IP address, and systemd resolves no names", hint="write the address") from None
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


def main() -> int:
    """Exit code 0 also where nothing had to be written."""
    folder = Path(sys.argv[1])
    try:
        found = list(drop_ins(load_config(DEFAULT_PATH if DEFAULT_PATH.exists() else None).config))
    except ApplianceError as error:
        print(f"the units of llm-appliance keep their defaults: {error}", file=sys.stderr)
        return 1
    for unit, text in found:
        (folder / f"{unit}.d").mkdir(parents=True, exist_ok=True)
        (folder / f"{unit}.d" / "appliance-toml.conf").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
