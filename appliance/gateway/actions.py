"""What an owner may do through the port: drain, resume, restart, go back to the original rung.

Off unless `gateway.admin_actions` is true, and then for keys with `admin = true` alone. The key comes in a header that no
web page of somebody else's can send, so that a browser cannot be talked into it.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from appliance.config.api_keys import ApiKey
from appliance.control.client import AsyncControl
from appliance.core.errors import ApplianceError, Unreachable
from appliance.gateway.envelope import JSON_TYPE, Refused
from appliance.gateway.headers import Headers

log = logging.getLogger("gateway.actions")

PREFIX = "/admin/"
_VERBS: dict[str, tuple[str, dict[str, Any]]] = {
    "/admin/drain": ("drain", {}),
    "/admin/resume": ("resume", {}),
    "/admin/restart": ("restart", {}),
    "/admin/original": ("restart", {"rung": 0}),
}
PATHS = tuple(_VERBS)


class Actions:
    """Passes them on to applianced, which decides."""

    def __init__(self, control: AsyncControl, *, enabled: bool) -> None:
        self._control = control
        self.enabled = enabled

    def allowed(self, key: ApiKey) -> bool:
        """Whether the page has buttons for this key."""
        return self.enabled and key.admin

    async def perform(self, path: str, key: ApiKey) -> tuple[int, Headers, bytes]:
        """The answer. Raises Refused: 403, or 409 where applianced says no, or 503 where it says nothing."""
        if not self.enabled:
            raise Refused(
                403,
                "actions_off",
                "the engine is not governed through this port",
                hint="set gateway.admin_actions = true, or use appliancectl",
            )
        if not key.admin:
            raise Refused(403, "not_admin", f"the key {key.name!r} is none of an admin", hint="admin = true in its entry makes it one")
        verb, arguments = _VERBS[path]
        if verb != "resume":  # which takes no reason
            arguments = {**arguments, "reason": f"asked through the gateway with the key {key.name}"}
        log.warning("%s: asked with the admin key %s", path, key.name)
        try:
            answer = await self._control.ask(verb, **arguments)
        except Unreachable as error:
            raise Refused(503, "applianced_unreachable", error.message, hint=error.hint, retry_after_s=1) from None
        except ApplianceError as error:
            raise Refused(409, "not_now", error.message, hint=error.hint) from None
        return 200, [JSON_TYPE], json.dumps(answer).encode()
