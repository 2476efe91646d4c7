"""What the gateway says of itself, for verbs that show it beside applianced's word."""

from __future__ import annotations

import http.client
import json

from appliance.cli.gateway_address import address_of

DEADLINE_S = 1.0
ANSWER_MAX_BYTES = 4 * 1024**2


def restrictions_at(url: str) -> list[str]:
    """What admission holds back or refuses, a sentence each (docs/gateway.md).

    Nothing where it does not say so in a second and without a key: a gateway that is away has other verbs to tell of it.
    """
    address = address_of(url)
    kind = http.client.HTTPSConnection if address.tls else http.client.HTTPConnection
    connection = kind(address.host, address.port, timeout=DEADLINE_S)
    try:
        connection.request("GET", "/status")
        answer = connection.getresponse()
        document = json.loads(answer.read(ANSWER_MAX_BYTES)) if answer.status == http.client.OK else {}
    except (OSError, http.client.HTTPException, ValueError):
        return []
    finally:
        connection.close()
    said = document.get("restrictions") if isinstance(document, dict) else None
    return [str(words) for words in said] if isinstance(said, list) else []
