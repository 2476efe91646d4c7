"""`python -m appliance.socket_drop_in DIR`: the gateway's address of appliance.toml as a drop-in of its systemd socket.

Run by a systemd generator, early at boot: no network, no other service, nothing but the configuration. Only standard
error of a generator is seen (in the kernel log), so what is wrong with the configuration is left to those who report it better.
"""

from __future__ import annotations

import ipaddress
import sys
from pathlib import Path

from appliance.config import Config, load_config
from appliance.config.load import DEFAULT_PATH
from appliance.core.errors import ApplianceError


def drop_in(config: Config) -> str | None:
    """The drop-in's text; None where the unit's own default says the same.

    Raises:
        ApplianceError: an address that systemd cannot hold: it resolves no names, and port 0 is no port.
    """
    host, port = config.gateway.host, config.gateway.port
    if (host, port) == (Config().gateway.host, Config().gateway.port):
        return None
    if port == 0:
        raise ApplianceError("gateway.port = 0 names no port that systemd could hold", hint="choose one from 1 to 65535")
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        raise ApplianceError(f"gateway.host = {host!r} is no IP address, and systemd resolves no names", hint="write the address") from None
    listen = f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"
    # An address of this machine may come up later than the socket. The empty line forgets the unit's own.
    return f"# gateway.host and gateway.port of appliance.toml\n[Socket]\nListenStream=\nListenStream={listen}\nFreeBind=yes\n"


def main() -> int:
    """Exit code 0 also where nothing had to be written."""
    folder = Path(sys.argv[1])
    try:
        text = drop_in(load_config(DEFAULT_PATH if DEFAULT_PATH.exists() else None).config)
    except ApplianceError as error:
        print(f"llm-appliance-gateway.socket keeps its default address: {error}", file=sys.stderr)
        return 1
    if text is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "address.conf").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
