"""The same case in another coat: wrappers, copies and company must not change the verdict."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from appliance.core.diagnosis import Confidence
from appliance.core.evidence import Evidence, Source
from appliance.diagnosis import diagnose, read_evidence
from tests.unit.diagnosis.corpus_cases import CORPUS, TAKEN_S, TEXTS, CorpusCase, load

CASES = load(CORPUS) + load(CORPUS / "variants")
TRAFFIC = "\n".join(f'INFO:     10.0.0.{host}:40112 - "POST /v1/chat/completions HTTP/1.1" 200 OK' for host in range(250)) + "\n"


def each_line(coat: Callable[[str], str]) -> Callable[[str], str]:
    """A disguise of a log from one of a line."""
    return lambda log: "\n".join(coat(line) for line in log.split("\n"))


DISGUISES = {
    "compose": each_line(lambda line: f"vllm-1  | {line}"),
    "ray": each_line(lambda line: f"\x1b[36m(RayWorkerWrapper pid=3121, ip=10.0.0.3)\x1b[0m {line}"),
    "crlf": lambda log: log.replace("\n", "\r\n"),
    "lost-escapes": each_line(lambda line: f"[0;36m{line}[0;0m"),
    "three-ranks": each_line(lambda line: f"{line}\n{line}\n{line}"),
    "cut-lines": each_line(lambda line: line[:400]),
    "after-hours-of-traffic": lambda log: TRAFFIC * 3 + log,
}


def disguised(case: CorpusCase, coat: Callable[[str], str]) -> list[Evidence]:
    """The case's evidence with its engine log in the coat, kinds to be found out."""
    found: list[Evidence] = []
    for kind, value in case.raw.items():
        if kind in TEXTS:
            found += read_evidence(coat(str(value)) if kind == "engine_log" else str(value), now_s=TAKEN_S)
        elif isinstance(value, dict):
            found.append(Evidence(Source.PROBE if kind == "probe" else Source.EXIT, "", data=value))
    return found


@pytest.mark.parametrize("name", DISGUISES)
def test_a_disguise_changes_nothing(name: str) -> None:
    """At least 98 % stay right, none becomes wrong with confidence."""
    verdicts = [(case, diagnose(disguised(case, DISGUISES[name]), stopped_by_us=case.stopped_by_us)) for case in CASES]
    wrong = [(case.name, verdict.cause.label, verdict.confidence) for case, verdict in verdicts if verdict.cause.label != case.cause]
    assert len(wrong) <= 0.02 * len(CASES), wrong
    assert not [item for item in wrong if item[2] is Confidence.HIGH]


COMPANY = {
    "another-service-stops": "Stopping man-db.service - Daily man-db regeneration...\nman-db.service: Deactivated successfully.",
    "another-service-out-of-memory": (
        "gitlab.service: A process of this unit has been killed by the OOM killer.\ngitlab.service: Failed with result 'oom-kill'."
    ),
    "restarted": (
        "vllm.service: Scheduled restart job, restart counter is at 1.\nStopped vllm.service - vLLM.\nStarted vllm.service - vLLM."
    ),
    "restarted-by-219": "Unit vllm.service entered failed state.\nvllm.service holdoff time over, scheduling restart.\nStopped vLLM.",
}


@pytest.mark.parametrize("name", COMPANY)
def test_what_systemd_says_of_others_and_of_restarts_changes_nothing(name: str) -> None:
    """A whole journal beside the evidence: nobody stopped the engine, and what happened to others is no cause of its end."""
    journal = "\n".join(f"Jan 01 00:00:01 box systemd[1]: {line}" for line in COMPANY[name].split("\n"))
    beside = read_evidence(journal, Source.SYSTEMD)
    changed = []
    for case in CASES:
        evidence = case.evidence()
        if any(item.source is Source.SYSTEMD for item in evidence):
            continue
        alone = diagnose(evidence, stopped_by_us=case.stopped_by_us).cause
        together = diagnose([*evidence, *beside], stopped_by_us=case.stopped_by_us).cause
        if alone is not together and not (alone.is_ok and together.is_ok):
            changed.append((case.name, alone.label, together.label))
    assert not changed
