"""Refusals as clients see them: OpenAI's error envelope."""

from __future__ import annotations

import json

from starlette.responses import Response


class ApiError(Exception):
    """A request that gets an error instead of an answer.

    Attributes:
        status: of HTTP.
        message: one sentence: what, the value, the limit, what to change.
        param: the body's field at fault, such as `messages[0].content`.
        code: OpenAI's or ours, for programs.
        retry_after_s: for 503.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def envelope(self) -> dict[str, object]:
        """`{"error": {"message", "type", "param", "code"}}`."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The envelope as a whole HTTP answer."""
        headers = {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}
        # ASCII only: the message may quote a client's lone surrogate, which UTF-8 cannot carry.
        return Response(json.dumps(self.envelope()).encode("ascii"), self.status, headers, media_type="application/json")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the body says something we cannot take."""
    return ApiError(400, message, param=param, code=code)


def no_engine(message: str, code: str) -> ApiError:
    """503: not now; the same request may succeed later."""
    return ApiError(503, message, code=code, retry_after_s=1)
