"""API keys at the door; `appliancectl key` makes them.

A key is looked up by its SHA-256. How long that takes depends on the hash alone, which nobody can steer towards another
one's, and the last word is a comparison in constant time. Keys are in no log, no metric and no error, and do not go on
to the engine.
"""

from __future__ import annotations

import hmac
import logging
from pathlib import Path

from appliance.config.api_keys import ApiKey, hash_of, read_api_keys
from appliance.core.errors import ConfigError
from appliance.gateway.envelope import Refused
from appliance.gateway.headers import Headers

log = logging.getLogger("gateway.keys")

ANYBODY = ApiKey("")
"""Who asks where no keys are configured."""
CARRIERS = frozenset({b"authorization", b"x-api-key"})
"""Headers that hold a key: OpenAI's clients send the first, Anthropic's the second."""


class KeyRing:
    """The keys of one file; `reload` replaces all of them or none."""

    def __init__(self, path: Path | None) -> None:
        """Raises ConfigError where the file cannot be used. Without a file everybody may come in."""
        self._path = path
        self._by_hash = {} if path is None else _by_hash(path)

    @property
    def required(self) -> bool:
        """Whether requests need a key."""
        return self._path is not None

    def reload(self) -> None:
        """Read the file again. A file that is wrong changes nothing: whoever could come in still can."""
        if self._path is None:
            return
        try:
            self._by_hash = _by_hash(self._path)
        except ConfigError as error:
            log.error("the API keys stay as they were: %s", error)
        else:
            log.info("%d API keys read from %s", len(self._by_hash), self._path)

    def admit(self, headers: Headers) -> ApiKey:
        """Whose key it is.

        Raises:
            Refused: 401: none, or one that is not ours.
        """
        if self._path is None:
            return ANYBODY
        given = _given(headers)
        if not given:
            raise _unknown("no_api_key", "this endpoint needs an API key, and the request has none")
        digest = hash_of(given)
        entry = self._by_hash.get(digest)
        if not hmac.compare_digest(digest, "" if entry is None else entry.sha256) or entry is None:
            raise _unknown("invalid_api_key", "the API key is not one of this endpoint's")
        return entry

    def onwards(self, headers: Headers) -> Headers:
        """The headers as the engine may see them."""
        return headers if self._path is None else [header for header in headers if header[0] not in CARRIERS]


def may_use_model(entry: ApiKey) -> None:
    """Raises Refused 403 for a key that is for monitoring."""
    if entry.monitor_only:
        raise Refused(
            403,
            "monitor_only",
            f"the key {entry.name!r} is for /status and /metrics",
            hint="remove monitor_only from its entry, or use another",
        )


def _by_hash(path: Path) -> dict[str, ApiKey]:
    return {entry.sha256: entry for entry in read_api_keys(path)}


def _given(headers: Headers) -> bytes:
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip()
        if name == b"x-api-key":
            return value.strip()
    return b""


def _unknown(code: str, message: str) -> Refused:
    return Refused(401, code, message, hint="send it as `Authorization: Bearer KEY` or `x-api-key: KEY`")
