"""A bundle holds the report and the evidence, opens with tar, and holds no secret."""

from __future__ import annotations

import io
import json
import tarfile

import zstandard

from appliance.core.evidence import Evidence, Source
from appliance.diagnosis import diagnose, read_evidence
from appliance.diagnosis.bundle import FOLDER, write_bundle

LOG = """Aug 16 09:41:30 gpubox7 sglang[901]: INFO:     10.1.2.3:40112 - "POST /v1/chat/completions HTTP/1.1" 200 OK
Aug 16 09:41:31 gpubox7 sglang[901]: api_key='topsecret99' text='please keep this private' /home/annette/models
Aug 16 09:41:40 gpubox7 sglang[901]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 48.00 MiB. /home/annette/x.py
"""


def opened(raw: bytes) -> dict[str, str]:
    """The bundle's files by name."""
    plain = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(raw)).read()
    with tarfile.open(fileobj=io.BytesIO(plain)) as tar:
        files = {member.name: tar.extractfile(member) for member in tar.getmembers()}
        return {name.removeprefix(f"{FOLDER}/"): file.read().decode() for name, file in files.items() if file is not None}


def test_a_bundle_can_be_passed_on() -> None:
    """Report in three forms, evidence by source, extra files, the list of what was taken out; nothing private anywhere."""
    evidence = [*read_evidence(LOG, now_s=1.787e9), Evidence(Source.EXIT, "", data={"code": 137})]
    out = io.BytesIO()
    taken = write_bundle(out, diagnose(evidence), evidence, now_s=1e9, extra={"config.toml": 'token = "hf_AbCdEfGhIjKlMnOpQrSt"\n'})
    files = opened(out.getvalue())
    assert set(files) == {
        "report.txt", "report.md", "report.json", "redacted.txt", "evidence/engine_log.log", "evidence/exit.log", "extra/config.toml",
    }  # fmt: skip
    whole = "\n".join(files.values())
    for secret in ("10.1.2.3", "topsecret99", "keep this private", "annette", "hf_AbCdEf"):
        assert secret not in whole, secret
    assert json.loads(files["report.json"])["cause"].startswith("cuda_oom")
    assert "Tried to allocate 48.00 MiB" in files["evidence/engine_log.log"]
    assert {item.kind for item in taken} >= {"ip", "key", "prompt", "user", "token"}
    assert files["redacted.txt"].count("taken out") == len(taken)
