"""Where this box's gateway is, for verbs that ask it something."""

from __future__ import annotations

from pathlib import Path

from appliance.cli.place import Place
from appliance.core.errors import ApplianceError


def gateway_url(place: Place) -> str:
    """As configured. Raises ApplianceError where the configuration cannot say it."""
    gateway = place.load().config.gateway
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(gateway.host, gateway.host)
    if not gateway.port:
        raise ApplianceError("gateway.port = 0: the kernel has chosen the port", hint="say which with --url http://127.0.0.1:PORT")
    return f"{'https' if gateway.tls_certificate else 'http'}://{host}:{gateway.port}"


def key_in(file: Path | None) -> str:
    """The API key in a file whose only line it is; empty without one."""
    return file.read_text(encoding="utf-8").strip() if file is not None else ""
