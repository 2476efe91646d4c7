"""Refusals, and how a client sees them: OpenAI's error envelope, everywhere."""

from __future__ import annotations

import json
import math
from typing import Any

from appliance.core.errors import ApplianceError
from appliance.gateway.headers import Headers

JSON_TYPE = (b"content-type", b"application/json")
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class Refused(ApplianceError):
    """A request gets an error instead of an answer.

    Attributes:
        status: of HTTP.
        code: for programs; the message is for people.
        param: the field of the body that is wrong, if one is.
        retry_after_s: when trying again makes sense; None says nothing about it.
        incident_id: of the incident that the sentence speaks of, if one.
        allow: for 405, the methods that the path has.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        hint: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        incident_id: str | None = None,
        allow: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.incident_id = incident_id
        self.allow = allow

    def error(self) -> dict[str, Any]:
        """The inside of the envelope."""
        error: dict[str, Any] = {"message": str(self), "type": type_of(self.status), "param": self.param, "code": self.code}
        if self.incident_id is not None:
            error["incident_id"] = self.incident_id
        return error

    def body(self) -> bytes:
        """The envelope."""
        return json.dumps({"error": self.error()}, ensure_ascii=False).encode("utf-8", "replace")

    def headers(self) -> Headers:
        """Content type, and what else the refusal says in headers."""
        headers = [JSON_TYPE]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % max(1, math.ceil(self.retry_after_s))))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if self.allow is not None:
            headers.append((b"allow", self.allow.encode("ascii")))
        return headers


def type_of(status: int) -> str:
    """OpenAI's `type` for a status."""
    return _TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")


def in_envelope(status: int, body: bytes, path: str = "") -> bytes:
    """An engine's error body as the envelope: untouched where it is a whole one, else made one with the sentence it holds.

    SGLang sends `{"object": "error", "message": ...}`, FastAPI `{"detail": ...}`, others plain text. `path` names what was not
    found where the engine says no more than that it was not.
    """
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        document = body.decode("utf-8", "replace").strip()[:2000]
    if isinstance(document, dict) and isinstance(document.get("error"), dict) and "message" in document["error"]:
        error = {"type": type_of(status), "param": None, "code": None, **document["error"]}
        return body if len(error) == len(document["error"]) else json.dumps({**document, "error": error}).encode()
    fields = document if isinstance(document, dict) else {}
    message = next((fields[key] for key in ("message", "detail", "error", "status") if fields.get(key)), document)
    if not isinstance(message, str):
        message = json.dumps(message)
    if status == 404 and path and message.strip(". ").lower() == "not found":
        message = f"the engine has nothing at {path[:200]}"
    error = {
        "message": message or f"the engine answered {status} without a body",
        "type": type_of(status),
        "param": fields.get("param"),
        "code": fields.get("code"),
    }
    return json.dumps({"error": error}).encode()
