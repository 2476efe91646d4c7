"""gateway.tls_certificate and tls_key: the gateway serves with the pair, `appliancectl config check` only looks whether it could."""

from __future__ import annotations

import ssl
from pathlib import Path

from appliance.core.errors import ConfigError


def load_pair(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    """Read both files into the context.

    Raises:
        ConfigError: one cannot be read, or the two do not belong together.
    """
    for path, name in ((certificate, "tls_certificate"), (key, "tls_key")):
        try:
            path.open("rb").close()
        except OSError as error:
            raise ConfigError(
                f"gateway.{name} = {str(path)!r}: cannot be read ({error.strerror})", hint="the gateway's user must be able to read it"
            ) from None
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError; ValueError: the password callback's
        reason = getattr(error, "reason", None) or str(error)
        raise ConfigError(
            f"gateway.tls_certificate = {str(certificate)!r} and tls_key = {str(key)!r} cannot be used: {reason}",
            hint="give the full chain in PEM, and its own key in PEM without a passphrase",
        ) from None


def _no_password() -> str:
    """OpenSSL would ask on the terminal, and a service has none."""
    raise ValueError("the key has a passphrase")
