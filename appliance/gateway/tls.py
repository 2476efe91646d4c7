"""TLS by certificate files, read again on SIGHUP: what certbot and its kind renew is in force without a restart."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from appliance.config.certificates import load_pair
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
        load_pair(self.context, certificate, key)

    def reload(self) -> None:
        """New connections get the new certificate; a pair that is wrong changes nothing."""
        try:
            # A try first: it would leave half of a pair behind in the one that serves.
            load_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self._certificate, self._key)
            load_pair(self.context, self._certificate, self._key)
        except ConfigError as error:
            log.error("the certificate stays as it was: %s", error)
        else:
            log.info("certificate read from %s", self._certificate)
