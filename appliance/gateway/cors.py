"""Cross-origin access for web pages, off unless the owner names their origins."""

from __future__ import annotations

from collections.abc import Sequence

from appliance.gateway.headers import Headers, value_of

MAX_AGE_S = 600
_METHODS = b"GET, POST, PUT, PATCH, DELETE"
_EXPOSED = b"x-request-id, retry-after, x-appliance-fallback, x-appliance-prompt"


class Cors:
    """`origins` as browsers send them, such as `https://chat.example.org`; "*" allows any."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origin.encode("latin-1", "replace") for origin in origins)

    def granted(self, request: Headers) -> Headers:
        """What every answer to this request says; nothing to a page that may not read it."""
        if not self._origins:
            return []
        origin = value_of(request, b"origin")
        if origin is None or not (origin in self._origins or b"*" in self._origins):
            return []
        return [(b"access-control-allow-origin", origin), (b"access-control-expose-headers", _EXPOSED), (b"vary", b"origin")]

    def preflight(self, method: str, request: Headers) -> Headers | None:
        """The answer's headers when a browser asks whether it may ask; it has no API key to show at that point."""
        if method != "OPTIONS" or value_of(request, b"access-control-request-method") is None:
            return None
        if not self.granted(request):
            return None
        wanted = value_of(request, b"access-control-request-headers")
        headers = [(b"access-control-allow-methods", _METHODS), (b"access-control-max-age", b"%d" % MAX_AGE_S)]
        return headers if wanted is None else [*headers, (b"access-control-allow-headers", wanted)]
