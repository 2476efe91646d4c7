"""`engine.backend` → its file."""

from __future__ import annotations

from appliance.backends.custom import CustomBackend
from appliance.backends.llamacpp import LlamacppBackend
from appliance.backends.native import NativeBackend
from appliance.backends.protocol import Backend
from appliance.backends.sglang import SglangBackend
from appliance.backends.vllm import VllmBackend
from appliance.config.schema import Config


def backend_of(config: Config) -> Backend:
    """The configured one; the schema allows no other word."""
    engine = config.engine
    match engine.backend:
        case "native":
            return NativeBackend(engine)
        case "sglang":
            return SglangBackend(engine)
        case "vllm":
            return VllmBackend(engine)
        case "llamacpp":
            return LlamacppBackend(engine)
    return CustomBackend()
