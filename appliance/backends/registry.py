"""`engine.backend` → its file."""

from __future__ import annotations

from appliance.backends.custom import CustomBackend
from appliance.backends.native import NativeBackend
from appliance.backends.protocol import Backend
from appliance.config.schema import Config


def backend_of(config: Config) -> Backend:
    """The configured one; the schema allows no other word."""
    backends: dict[str, Backend] = {backend.name: backend for backend in (NativeBackend(), CustomBackend())}
    return backends[config.engine.backend]
