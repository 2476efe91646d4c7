"""TLS by certificate files, read again on SIGHUP: what certbot and its kind renew is in force without a restart."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from appliance.core.errors import ConfigError

log = logging.getLogger("gateway.tls")

SHUTDOWN_TIMEOUT_S = 2.0
"""How long a closing connection waits for its client to say goodbye too."""


class Tls:
    """A certificate and its key; `context` is for listening sockets, and always holds the last good pair."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Raises ConfigError where the two cannot be used."""
        self._certificate = certificate
        self._key = key
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols(["http/1.1"])
        self._load(self.context)

    def reload(self) -> None:
        """New connections get the new certificate; a pair that is wrong changes nothing."""
        try:
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))  # a try that would leave half of a pair behind in the other
            self._load(self.context)
        except ConfigError as error:
            log.error("the certificate stays as it was: %s", error)
        else:
            log.info("certificate read from %s", self._certificate)

    def _load(self, context: ssl.SSLContext) -> None:
        for path, name in ((self._certificate, "tls_certificate"), (self._key, "tls_key")):
            try:
                path.open("rb").close()
            except OSError as error:
                raise ConfigError(
                    f"gateway.{name} = {str(path)!r}: cannot be read ({error.strerror})", hint="the gateway's user must be able to read it"
                ) from None
        try:
            context.load_cert_chain(self._certificate, self._key, password=_no_password)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError; ValueError: the password callback's
            reason = getattr(error, "reason", None) or str(error)
            raise ConfigError(
                f"gateway.tls_certificate = {str(self._certificate)!r} and tls_key = {str(self._key)!r} cannot be used: {reason}",
                hint="give the full chain in PEM, and its own key in PEM without a passphrase",
            ) from None


def _no_password() -> str:
    """OpenSSL would ask on the terminal, and a service has none."""
    raise ValueError("the key has a passphrase")
