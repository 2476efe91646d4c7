"""Which path is what. A table, so that a reader and a test see all of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from appliance.gateway import actions, live, page_files
from appliance.gateway.envelope import Refused


class Kind(enum.Enum):
    """How a path is served."""

    PAGE = "page"
    """By the gateway itself."""
    EVENTS = "events"
    """Likewise, and for as long as somebody looks."""
    ADMIN = "admin"
    """An order to applianced."""
    JSON = "json"
    """POST with a JSON object, to the engine."""
    OTHER = "other"
    """To the engine as it is."""


@dataclass(frozen=True, slots=True)
class Route:
    """What there is to know of a path.

    Attributes:
        label: what metrics call it: bounded in number, whatever clients ask for.
        takes_slot: it makes the engine decode.
        streams: `"stream": true` in its body asks for server-sent events.
    """

    kind: Kind
    label: str
    takes_slot: bool
    streams: bool = False


_STREAMING = ("/generate", "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
_COMPUTING = ("/v1/classify", "/v1/embeddings", "/v1/rerank", "/v1/score")
_COUNTING = ("/detokenize", "/tokenize", "/v1/detokenize", "/v1/messages/count_tokens", "/v1/tokenize")
PAGES = ("/", "/health", "/metrics", "/status", "/status/incident.md", "/status/incident.tar.zst")
OPEN_PAGES = frozenset({"/", "/health", *page_files.FILES})
"""For load balancers and the curious: without a key, and without anything about requests."""
_ROUTES = {
    **{path: Route(Kind.JSON, path, True, True) for path in _STREAMING},
    **{path: Route(Kind.JSON, path, True) for path in _COMPUTING},
    **{path: Route(Kind.JSON, path, False) for path in _COUNTING},
    **{path: Route(Kind.PAGE, "/page/*", False) for path in page_files.FILES},
    **{path: Route(Kind.PAGE, path, False) for path in PAGES},
    **{path: Route(Kind.ADMIN, path, False) for path in actions.PATHS},
    live.PATH: Route(Kind.EVENTS, live.PATH, False),
    "/v1/models": Route(Kind.OTHER, "/v1/models", False),
}
_ANY_OTHER = Route(Kind.OTHER, "/v1/*", True)
READING_METHODS = ("GET", "HEAD")
"""These never take a slot, whatever the route says."""
_OTHER_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")


def route_of(method: str, path: str) -> Route:
    """Where a request goes.

    Raises:
        Refused: 404 or 405.
    """
    route = _ROUTES.get(path)
    if route is None:
        if not path.startswith("/v1/") or "/." in path or "//" in path:  # "..": the engine has paths that are not for clients
            raise Refused(
                404, "unknown_path", f"there is nothing at {path[:200]}", hint="the API is under /v1/, such as /v1/chat/completions"
            )
        route = _ANY_OTHER
    allowed = _methods(path, route)
    if method not in allowed:
        raise Refused(405, "method_not_allowed", f"{path[:200]} is not for {method}", hint=f"use {allowed[0]}", allow=", ".join(allowed))
    return route


def _methods(path: str, route: Route) -> tuple[str, ...]:
    if route.kind is Kind.JSON:
        # Of these, an engine may let stored answers be read back.
        return ("POST", "GET", "HEAD") if path == "/v1/responses" else ("POST",)
    if route.kind in (Kind.ADMIN, Kind.EVENTS):
        return ("POST",) if route.kind is Kind.ADMIN else ("GET",)
    return READING_METHODS if route.kind is Kind.PAGE or path == "/v1/models" else _OTHER_METHODS
