"""Stops that somebody asked systemd for. `Stopping X...` is printed for nothing else; `Stopped X.` also whenever a service that failed is
started anew, and then it is nobody's wish.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from appliance.core.evidence import Evidence, Source
from appliance.diagnosis.causality import ZONE_UNKNOWN_S, distance_s
from appliance.diagnosis.events import Event

MARKS = ("unit_started", "unit_down", "unit_stopping", "unit_stopped")
LONGEST_S = 3600.0
"""What happens later than this after a stop was asked for is no part of it."""
SLACK_S = 2.0
"""systemd and the engine write their lines down at their own pace."""
_ENGINES = re.compile(
    r"vllm|sglang|ollama|llama|text-generation|\btgi\b|\bllm|aphrodite|lmdeploy|tabby|kobold|triton|applianced?\b|inference|"
    r"(?<!container )engine|\bray\b|model|\bserve\b|\bai\b|chat|qwen|mistral|gemma|deepseek|embed|rerank|whisper",
    re.IGNORECASE,
)
_SYSTEM = re.compile(
    r"man-db|apt-daily|logrotate|fstrim|e2scrub|\b(?:ana)?cron|cups|fwupd|packagekit|snapd|NetworkManager|\bsystemd-|\bdbus|polkit|\bsshd?\b|"
    r"udisks|upower|\bgdm|lightdm|getty|postgres|mysql|mariadb|nginx|apache|redis|gitlab|jenkins|prometheus|grafana|exporter|\bmotd|"
    r"\bgnome|plasma|kwin|wayland|\bxorg|pipewire|wireplumber|pulseaudio|tracker-|evolution|xdg-|firefox|chrom(?:e|ium)|"
    r"unattended|update-notifier|plymouth|ModemManager|bluetooth|avahi|rsyslog|chrony|\bntp|\btimer\b|\.timer|\.socket|\.mount",
    re.IGNORECASE,
)
"""What every machine runs, and what often stands beside an engine."""
_HOSTS = re.compile(r"docker|containerd|podman|libpod|\bk3s|kubelet|\bcrio|slurmd|\blxc|\bscreen|\btmux", re.IGNORECASE)
"""What engines are run by, and stopped with."""


@dataclass(frozen=True, slots=True)
class Stop:
    """A stop that was asked for, until the next start."""

    line: Event
    until: Event | None = None

    @property
    def certain(self) -> bool:
        """It names the engine, or what engines are run by; any other service's stop has to be heard of from the engine too."""
        return of_engine(self.line.text) or _HOSTS.search(self.line.text) is not None

    def covers(self, event: Event) -> bool:
        """Whether what happened belongs to it; where neither order nor clock can tell, it may."""
        if _after(event, self.line) is False or (self.until is not None and _after(self.until, event) is False):
            return False
        later_s = distance_s(event.evidence, self.line.evidence)
        same_zone = _zone(event.evidence) is _zone(self.line.evidence)
        return later_s is None or later_s < (LONGEST_S if same_zone else ZONE_UNKNOWN_S)


def of_engine(text: str) -> bool:
    """Whether a unit's name or description is one that engines have."""
    return _ENGINES.search(text) is not None


def of_the_system(text: str) -> bool:
    """Whether a unit's name or description is one that no engine has."""
    return _SYSTEM.search(text) is not None and not of_engine(text)


def stops_of(events: Sequence[Event]) -> tuple[Stop, ...]:
    """Those of systemd's log, in order; where it speaks of engines by name, only theirs."""
    marks = [event for event in events if event.name in MARKS and event.source is Source.SYSTEMD and not of_the_system(event.text)]
    named = [event for event in marks if of_engine(event.text)]
    return tuple(_stops(named or marks))


def _stops(marks: Sequence[Event]) -> Iterator[Stop]:
    asked: Stop | None = None
    down = False
    for mark in marks:
        if mark.name == "unit_started":
            if asked is not None:
                yield replace(asked, until=mark)
            asked, down = None, False
        elif mark.name == "unit_down":
            down = True
        elif asked is None and not down:
            asked = Stop(mark)
    if asked is not None:
        yield asked


def _after(one: Event, other: Event) -> bool | None:
    """Whether `one` happened at the time of `other` or later; None where nothing can be compared."""
    if one.source is other.source:
        return one.order >= other.order
    apart_s = distance_s(one.evidence, other.evidence)
    if apart_s is None or (_zone(one.evidence) is not _zone(other.evidence) and abs(apart_s) < ZONE_UNKNOWN_S):
        return None
    return apart_s >= -SLACK_S


def _zone(evidence: Evidence) -> bool:
    return bool(evidence.data.get("zone_unknown"))
