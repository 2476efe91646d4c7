"""One incident to take along: its Markdown, for whoever may look at the page, and its bundle, for an owner."""

from __future__ import annotations

import base64
import re
from urllib.parse import parse_qs

from appliance.config.api_keys import ApiKey
from appliance.control.client import AsyncControl
from appliance.core.errors import ApplianceError, Unreachable
from appliance.gateway.envelope import Refused
from appliance.gateway.headers import Headers

_ID = re.compile(r"inc-[0-9a-z-]{1,60}")


async def incident_page(control: AsyncControl, path: str, query: bytes, key: ApiKey) -> tuple[int, Headers, bytes]:
    """`?id=inc-...`. Raises Refused: 400, 403, 404, 503."""
    incident_id = parse_qs(query.decode("latin-1")).get("id", [""])[0]
    if not _ID.fullmatch(incident_id):
        raise Refused(400, "invalid_incident", f"id = {incident_id[:80]!r} names no incident", hint="write ?id=inc-...", param="id")
    bundle = path.endswith(".tar.zst")
    if bundle and key.name and not key.admin:  # its evidence holds lines of the engine's log
        raise Refused(403, "not_admin", f"the key {key.name!r} is none of an admin", hint="admin = true in its entry makes it one")
    try:
        found = await control.ask("dossier", id=incident_id, bundle=bundle)
    except Unreachable as error:
        raise Refused(503, "applianced_unreachable", error.message, hint=error.hint, retry_after_s=1) from None
    except ApplianceError as error:
        raise Refused(404, "unknown_incident", error.message, hint=error.hint) from None
    headers: Headers = [(b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]
    if not bundle:
        return 200, [(b"content-type", b"text/markdown; charset=utf-8"), *headers], found["markdown"].encode()
    name = b'attachment; filename="%s.tar.zst"' % incident_id.encode()
    return 200, [(b"content-type", b"application/zstd"), (b"content-disposition", name), *headers], base64.b64decode(found["bundle"])
