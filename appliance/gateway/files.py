"""What the configuration names and does not hold: keys, certificate, the key for the fallback. Read before anything listens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from appliance.config import Config
from appliance.gateway.fallback import Fallback
from appliance.gateway.keys import KeyRing
from appliance.gateway.tls import Tls


@dataclass(frozen=True, slots=True)
class Files:
    """All of them, usable."""

    keys: KeyRing
    tls: Tls | None
    fallback: Fallback

    def reload(self) -> None:
        """SIGHUP: what can change without a client noticing. What is wrong stays as it was, and is logged."""
        self.keys.reload()
        if self.tls is not None:
            self.tls.reload()


def read_files(config: Config) -> Files:
    """Raises ConfigError for the first that cannot be used."""
    gateway = config.gateway
    return Files(
        keys=KeyRing(Path(gateway.api_keys_file) if gateway.api_keys_file else None),
        tls=Tls(Path(gateway.tls_certificate), Path(gateway.tls_key)) if gateway.tls_certificate else None,
        fallback=Fallback(config.fallback),
    )
