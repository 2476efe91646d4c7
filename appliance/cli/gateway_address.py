"""Where this box's gateway is, for verbs that ask it something."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from appliance.cli.place import Place
from appliance.core.errors import ApplianceError


def gateway_url(place: Place) -> str:
    """As configured. Raises ApplianceError where the configuration cannot say it."""
    gateway = place.load().config.gateway
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(gateway.host, gateway.host)
    if not gateway.port:
        raise ApplianceError("gateway.port = 0: the kernel has chosen the port", hint="say which with --url http://127.0.0.1:PORT")
    return f"{'https' if gateway.tls_certificate else 'http'}://{host}:{gateway.port}"


KEY_CURE = "name a file whose only line is one: --api-key-file FILE"


@dataclass(frozen=True, slots=True)
class Address:
    """Where HTTP is spoken."""

    host: str
    port: int
    tls: bool


def address_of(url: str) -> Address:
    """Raises ApplianceError for what is no URL of http or https, or one with a port that there is not."""
    hint = "write for example http://127.0.0.1:8000"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:  # a bracket that is not closed, port 99999
        raise ApplianceError(f"{url!r} is no address of a gateway: {error}", hint=hint) from None
    if parts.scheme not in ("http", "https") or not host:
        raise ApplianceError(f"{url!r} is no address of a gateway", hint=hint)
    tls = parts.scheme == "https"
    return Address(host, port or (443 if tls else 80), tls)


def key_in(file: Path | None) -> str:
    """The API key in a file whose only line it is; empty without one. Raises ApplianceError; what stands in the file is not repeated."""
    if file is None:
        return ""
    hint = "the file's only line is the key, as it was shown when it was made (sk-lla-...)"
    try:
        key = file.read_text(encoding="ascii").strip()
    except OSError as error:
        raise ApplianceError(f"{file} cannot be read: {error.strerror}", hint=hint) from None
    except UnicodeDecodeError:
        raise ApplianceError(f"{file} holds no API key: it is not ASCII", hint=hint) from None
    if not key or not key.isprintable() or " " in key:
        what = (
            "it is empty" if not key else f"it has {len(key.splitlines())} lines" if "\n" in key else "there are spaces or controls in it"
        )
        raise ApplianceError(f"{file} holds no API key: {what}", hint=hint)
    return key
