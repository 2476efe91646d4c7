"""Off with the wrappers: journald, syslog, docker, Kubernetes, dmesg, colours. What is left is the program's own line."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace

from appliance.core.evidence import Source
from appliance.diagnosis.reading.clock import Stamp, parse_iso, stamp_in

_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])|\[(?:\d{1,2};){0,3}\d{1,2}m")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_SYSLOG = re.compile(
    r"(?P<stamp>[^\W\d_]{2,5}\.? +\d{1,2} \d\d:\d\d:\d\d(?:\.\d+)?|\d{1,2}月 +\d{1,2} \d\d:\d\d:\d\d"
    r"|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)"
    r"|(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) \d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? [A-Z]{2,5}"
    r"|\[ *\d+\.\d+\]|\d{9,11}\.\d+)"
    r" (?P<host>[\w.-]+) (?P<ident>[\w./@:+-]+?(?: \w+)?|\(\S+\))(?:\[(?P<pid>\d+)\])?: ?(?P<text>.*)",
    re.DOTALL,
)
_CONTAINER_STAMP = re.compile(
    r"(?P<stamp>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3,9}(?:Z|[+-]\d\d:\d\d))(?: std(?:out|err) [FP])? (?P<text>.*)", re.DOTALL
)
_COMPOSE = re.compile(r"(?:\[pod/\S+\]|[\w.-]{1,60}(?:[-_]\d+)? +\|) (?P<text>.*)", re.DOTALL)
_DMESG = re.compile(
    r"(?:<\d{1,3}>)?\[(?P<stamp>"
    r" *[+\d]\d*\.\d{1,9}|[A-Z][a-z]{2} [A-Z][a-z]{2} +\d{1,2} \d\d:\d\d:\d\d \d{4})\](?: ?\[ *[TC]\d+\])? ?(?P<text>.*)",
    re.DOTALL,
)
_DMESG_ISO = re.compile(r"(?:\w+ *:\w+ *: )?(?P<stamp>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d+[+-]\d\d:\d\d) (?P<text>.*)", re.DOTALL)
_DMESG_DECODED = re.compile(
    r"(?:kern|user|daemon|syslog) *:(?:emerg|alert|crit|err|warn|notice|info|debug) *: (?:\[ *\d+\.\d+\] )?(?P<text>.*)", re.DOTALL
)
_TALOS = re.compile(
    r"(?:[\w.:-]{1,60}: )?(?:kern|user|daemon|syslog): +(?:emerg|alert|crit|err|warning|notice|info|debug): "
    r"\[(?P<stamp>\d{4}-\d\d-\d\dT[\d:.]{8,18}Z)\]: (?P<text>.*)",
    re.DOTALL,
)
_KMSG = re.compile(r"(?P<prio>\d{1,3}),\d+,(?P<micro>\d+),[-c+][^;]*;(?P<text>.*)", re.DOTALL)
_KERNEL_TEXT = re.compile(
    r"NVRM: |oom-kill:constraint=|(?:Memory cgroup o|O)ut of memory: Kill|\{\d+\}\[Hardware Error\]|pcieport [0-9a-f:.]+: "
    r"|nvidia [0-9a-f:.]+: "
    r"|AMD-Vi: |DMAR: |nvidia-modeset: |nvidia-uvm: |INFO: task \S+ blocked for more|oom_reaper: |amd_iommu_report"
)
_SYSTEMD_TEXT = re.compile(
    r"-- (?:Boot [0-9a-f]+|Reboot) --|(?:ActiveState|SubState|Result|MainPID|NRestarts|ExecMain\w+|LoadState)="
    r"|\S+\.(?:service|slice|scope|socket): (?:Main process|Failed with|"
    r"Watchdog timeout|State '|Scheduled restart|Start request|A process of this unit|Killing process|Processes still|Deactivated|Consumed)"
)
_BYSTANDER = re.compile(
    r"(?:alertmanager|prometheus|grafana|node_exporter|telegraf|collectd|zabbix|netdata|fluent-?(?:bit|d)|filebeat|promtail|loki|vector|monit|nagios|"
    r"sshd|dbus-daemon|NetworkManager|avahi-daemon|cupsd|gdm|gnome-shell|plasmashell|snapd|postfix|dovecot|nginx|apache2?|postgres|mysqld?)\b"
)
"""Programs that tell of others, or of nothing that an engine has to do with: what they quote happened elsewhere."""
_SYSTEMD_IDENTS = (
    "systemd",
    "systemd-oomd",
    "systemd-logind",
    "systemd-coredump",
    "systemd-shutdown",
    "systemd-journald",
    "unattended-upgrade",
)


@dataclass(frozen=True, slots=True)
class Unwrapped:
    """One line without its wrappers; `source` is None where nothing on the line says what it is."""

    text: str
    source: Source | None = None
    stamp: Stamp | None = None
    boot_id: str | None = None
    host: str | None = None


MOST_COATS = 8
"""Wrappers in wrappers: no pipe has more, and a line that goes on like one has no end."""


def unwrap(line: str, year: int, coats: int = MOST_COATS) -> Unwrapped:
    """Strip every known wrapper, outermost first, at most so many."""
    line = _CONTROL.sub("", _ANSI.sub("", line)).rstrip("\r\n")
    for strip in (_json_line, _container, _syslog, _kernel) if coats else ():
        inner = strip(line, year, coats - 1)
        if inner is not None:
            return inner
    return Unwrapped(line, _source_of(line), stamp_in(line, year))


def _container(line: str, year: int, coats: int) -> Unwrapped | None:
    match = _CONTAINER_STAMP.match(line)
    if match is not None and not _looks_like_host(match["text"]):
        inner = unwrap(match["text"], year, coats)
        return inner if inner.source is not None and inner.stamp is not None else replace(inner, stamp=parse_iso(match["stamp"]))
    match = _COMPOSE.match(line)
    return unwrap(match["text"], year, coats) if match is not None else None


def _looks_like_host(text: str) -> bool:
    """`host ident[pid]: ...` after the stamp: a syslog line in ISO form, not a container's; levels are not hosts."""
    return re.match(r"[\w.-]+ [\w./@-]+\[\d+\]: |[\w.-]+ (?:kernel|systemd): ", text) is not None


def _syslog(line: str, year: int, coats: int) -> Unwrapped | None:
    match = _SYSLOG.match(line)
    inner = None if match is None else _syslog_text(match, year, coats)
    return inner if match is None or inner is None else replace(inner, host=match["host"])


def _syslog_text(match: re.Match[str], year: int, coats: int) -> Unwrapped | None:
    ident, text = match["ident"], match["text"]
    if match["stamp"].startswith("[") and ident != "kernel" and match["pid"] is None:
        return None  # dmesg: "[ 7460.48] nvidia 0000:81:00.0: ..." has no host and no program
    stamp = stamp_in(match["stamp"], year)
    if ident == "kernel":
        inner = _kernel(text, year, coats)
        return Unwrapped(inner.text if inner is not None else text, Source.KERNEL_LOG, stamp)
    if ident.startswith(_SYSTEMD_IDENTS):
        return Unwrapped(text, Source.SYSTEMD, stamp)
    if ident == "NVRM":
        return Unwrapped(f"NVRM: {text}", Source.KERNEL_LOG, stamp)
    if _BYSTANDER.match(ident) is not None:
        return Unwrapped("", Source.SYSTEMD, stamp)
    inner = unwrap(text, year, coats) if text else Unwrapped(text)
    better = inner.stamp if inner.stamp is not None and not inner.stamp.year_unknown else None
    return Unwrapped(inner.text, inner.source or Source.ENGINE_LOG, better if stamp is None or (stamp.year_unknown and better) else stamp)


def _kernel(line: str, year: int, coats: int) -> Unwrapped | None:  # noqa: ARG001 - as its siblings
    line = line.removeprefix("kernel: ")
    match = _DMESG.match(line)
    if match is not None:
        return Unwrapped(match["text"], Source.KERNEL_LOG, stamp_in(match["stamp"], year))
    match = _DMESG_ISO.match(line) or _TALOS.match(line)
    if match is not None:
        return Unwrapped(match["text"], Source.KERNEL_LOG, parse_iso(match["stamp"]))
    match = _DMESG_DECODED.match(line)
    if match is not None:
        return Unwrapped(match["text"], Source.KERNEL_LOG)
    match = _KMSG.match(line)
    if match is not None and int(match["prio"]) >> 3 == 0:
        return Unwrapped(match["text"].replace("\\x0a", " "), Source.KERNEL_LOG)
    return None


def _source_of(line: str) -> Source | None:
    if _KERNEL_TEXT.match(line.lstrip()):
        return Source.KERNEL_LOG
    if "NVRM: " in line[:200]:
        return Source.KERNEL_LOG
    return Source.SYSTEMD if _SYSTEMD_TEXT.match(line) else None


def _json_line(line: str, year: int, coats: int) -> Unwrapped | None:
    """A line of `journalctl -o json`, of docker's json-file, or of a program that logs JSON."""
    if not line.startswith("{"):
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    if "MESSAGE" in record or "__REALTIME_TIMESTAMP" in record:
        return _journal_record(record, year, coats)
    if isinstance(record.get("log"), str):
        return replace(unwrap(record["log"], year, coats), stamp=parse_iso(str(record.get("time", ""))))
    message = record.get("message", record.get("msg", record.get("event")))
    if isinstance(record.get("fields"), dict) and message is None:
        message = record["fields"].get("message")
    if not isinstance(message, str):
        return None
    if record.get("function") == "log_server_request":  # llama.cpp of 2023 and 2024
        message = f"log_server_request {message} | status={record.get('status')}"
    error = record.get("error")
    said = f"{message} {error}" if isinstance(error, str) else message
    return replace(unwrap(said, year, coats), stamp=parse_iso(str(record.get("timestamp", record.get("time", "")))))


def _journal_record(record: dict[str, object], year: int, coats: int) -> Unwrapped:
    message = record.get("MESSAGE")
    if isinstance(message, list):
        message = bytes(byte & 255 for byte in message if isinstance(byte, int)).decode("utf-8", "replace")
    inner = unwrap(str(message or ""), year, coats) if not str(message or "").startswith("{") else Unwrapped(str(message))
    ident = str(record.get("SYSLOG_IDENTIFIER") or record.get("_COMM") or "")
    source = inner.source or Source.ENGINE_LOG
    if str(record.get("SYSLOG_FACILITY", "0")) == "0" and (record.get("_TRANSPORT") == "kernel" or ident == "kernel"):
        source = Source.KERNEL_LOG  # user space may write to /dev/kmsg, but not as facility 0
    elif ident.startswith(_SYSTEMD_IDENTS):
        source = Source.SYSTEMD
    micro = str(record.get("_SOURCE_REALTIME_TIMESTAMP") or record.get("__REALTIME_TIMESTAMP") or "")
    stamp = Stamp(int(micro) / 1e6, False) if micro.isdecimal() and len(micro) < 18 else inner.stamp
    text = inner.text.replace("\n", " ") if source is Source.KERNEL_LOG else inner.text
    boot_id, host = (str(record[key]) if key in record else None for key in ("_BOOT_ID", "_HOSTNAME"))
    return Unwrapped(text, source, stamp, boot_id, host)
