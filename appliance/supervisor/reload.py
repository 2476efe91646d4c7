"""SIGHUP: which changed keys take effect when. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from appliance.config.keys import keys_of
from appliance.config.schema import Config, tables


class When(enum.Enum):
    """The value is how it is said."""

    NOW = "in force now"
    NEXT_ENGINE = "takes effect with the next engine: appliancectl restart"
    RESTART = "needs a restart: systemctl restart llm-appliance"
    GATEWAY = "is the gateway's: systemctl restart llm-appliance-gateway"


_OF_TABLE = {
    "model": When.NEXT_ENGINE,
    "engine": When.NEXT_ENGINE,
    "budget": When.NEXT_ENGINE,
    "ladder": When.NOW,
    "supervisor": When.NOW,
    "gpu": When.RESTART,
    "diagnosis": When.RESTART,
    "gateway": When.GATEWAY,
    "admission": When.GATEWAY,
    "resume": When.GATEWAY,
    "fallback": When.GATEWAY,
    "metrics": When.GATEWAY,
}
_OF_KEY = {
    "engine.backend": When.RESTART,
    "engine.warm_spare": When.NOW,
    "diagnosis.log_ring_lines": When.NEXT_ENGINE,
    "supervisor.probe_interval_s": When.NEXT_ENGINE,
    "supervisor.probe_timeout_s": When.NEXT_ENGINE,
    "supervisor.hang_floor_s": When.NEXT_ENGINE,
    "supervisor.hang_ceiling_s": When.NEXT_ENGINE,
    "supervisor.start_deadline_s": When.NEXT_ENGINE,
    "supervisor.start_stall_s": When.NEXT_ENGINE,
    "supervisor.canary_s": When.NEXT_ENGINE,
    "gateway.drain_s": When.NOW,
}


@dataclass(frozen=True, slots=True)
class Change:
    """One key that is not what it was."""

    key: str
    before: object
    after: object
    when: When


def changes(old: Config, new: Config) -> tuple[Change, ...]:
    """Every key that differs, in the order of the documentation."""
    found = []
    for table, kind in tables().items():
        for name in keys_of(kind):
            before, after = getattr(getattr(old, table), name), getattr(getattr(new, table), name)
            if before != after:
                key = f"{table}.{name}"
                found.append(Change(key, before, after, _OF_KEY.get(key, _OF_TABLE[table])))
    return tuple(found)


def merged(old: Config, new: Config) -> Config:
    """What the supervisor goes by from now on: the new one, but for the keys that need a restart."""
    kept: dict[str, dict[str, object]] = {}
    for change in changes(old, new):
        if change.when is When.RESTART:
            table, _, name = change.key.partition(".")
            kept.setdefault(table, {})[name] = change.before
    return replace(new, **{table: replace(getattr(new, table), **values) for table, values in kept.items()})
