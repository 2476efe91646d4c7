"""applianced with a defect: one of its handlers sleeps, and the loop with it. `drain` with the reason "block" sets it off."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from appliance.supervisor.__main__ import main
from appliance.supervisor.verbs import Verbs

_drain = Verbs.drain


async def _sleeps(self: Verbs, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    if arguments.get("reason") == "block":
        time.sleep(3600)  # noqa: ASYNC251 - this is the defect
    return await _drain(self, arguments)


if __name__ == "__main__":
    _sleeps.__name__ = "drain"  # by which the control server knows it
    Verbs.drain = _sleeps  # type: ignore[method-assign]
    sys.exit(main())
