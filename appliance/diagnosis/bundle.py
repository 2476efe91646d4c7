"""A verdict and its evidence as one file to pass on (`diagnose --bundle OUT.tar.zst`), without secrets."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import BinaryIO

import zstandard

from appliance.core.diagnosis import ChainLink, Citation, Diagnosis, Refuted
from appliance.core.evidence import Evidence
from appliance.diagnosis import incident_report, report
from appliance.diagnosis.dumps import found_in
from appliance.diagnosis.redact import Redaction, Redactor

FOLDER = "llm-appliance-bundle"
MOST_LINES = 20_000
"""Lines of one source that go in: the last ones."""


def write_bundle(
    out: BinaryIO,
    diagnosis: Diagnosis,
    evidence: Sequence[Evidence],
    *,
    now_s: float,
    incident: incident_report.Document | None = None,
    extra: Mapping[str, str] | None = None,
) -> list[Redaction]:
    """Write the tar.zst and return what was redacted (which also stands in the bundle).

    Args:
        incident: what the verdict is about, where it is one of a box.
        extra: further files by name, such as the effective configuration or the planned memory chain.
    """
    redactor = Redactor()
    with zstandard.ZstdCompressor().stream_writer(out, closefd=False) as packed, tarfile.open(fileobj=packed, mode="w|") as tar:
        for name, text in _files(diagnosis, evidence, incident, extra or {}, redactor):
            _add(tar, name, text, now_s)
        _add(tar, "redacted.txt", _redactions(redactor.report()), now_s)
    return redactor.report()


def _files(
    diagnosis: Diagnosis,
    evidence: Sequence[Evidence],
    incident: incident_report.Document | None,
    extra: Mapping[str, str],
    redactor: Redactor,
) -> Iterator[tuple[str, str]]:
    clean = redacted(diagnosis, redactor)
    found = [redactor.redact(item) for item in found_in(evidence)]
    did = None if incident is None else incident_report.done(incident, redactor)
    yield "report.txt", report.text(clean, did=did, found=found) + "\n"
    whole = report.markdown(clean, found) if incident is None else incident_report.markdown(incident, clean, redactor, found)
    yield "report.md", whole
    yield "report.json", json.dumps(report.to_json_dict(clean, found), indent=1, ensure_ascii=False) + "\n"
    for source in sorted({item.source for item in evidence}, key=lambda source: source.value):
        lines = [redactor.redact(_line(item)) for item in evidence if item.source is source]
        yield f"evidence/{source.value}.log", "\n".join(lines[-MOST_LINES:]) + "\n"
    for name, text in sorted(extra.items()):
        yield f"extra/{name}", redactor.redact(text)


def redacted(diagnosis: Diagnosis, redactor: Redactor) -> Diagnosis:
    """The verdict with every quoted line cleaned."""

    def cited(citation: Citation) -> Citation:
        return replace(citation, text=redactor.redact(citation.text))

    def ruled_out(item: Refuted) -> Refuted:
        citation = None if item.citation is None else cited(item.citation)
        return replace(item, reason=redactor.redact(item.reason), citation=citation)

    return replace(
        diagnosis,
        sentence=redactor.redact(diagnosis.sentence),
        root=None if diagnosis.root is None else cited(diagnosis.root),
        chain=tuple(ChainLink(link.role, link.label, cited(link.citation)) for link in diagnosis.chain),
        refuted=tuple(map(ruled_out, diagnosis.refuted)),
        doubts=tuple(map(redactor.redact, diagnosis.doubts)),
    )


def _line(item: Evidence) -> str:
    data = json.dumps({key: str(value) for key, value in item.data.items()}) if item.data and not item.text else ""
    return item.text or data


def _redactions(items: Iterable[Redaction]) -> str:
    rows = [f"{item.kind}: {item.count} taken out, {item.distinct} different" for item in items]
    return "\n".join(rows or ["nothing was taken out"]) + "\n"


def _add(tar: tarfile.TarFile, name: str, text: str, now_s: float) -> None:
    raw = text.encode("utf-8", "replace")
    entry = tarfile.TarInfo(f"{FOLDER}/{name}")
    entry.size, entry.mtime, entry.mode = len(raw), int(now_s), 0o644
    tar.addfile(entry, io.BytesIO(raw))
