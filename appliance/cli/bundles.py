"""`diagnose --bundle OUT.tar.zst`: verdict and evidence as one file to pass on, without secrets."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

import click

from appliance.cli.records import Document
from appliance.core.diagnosis import Diagnosis
from appliance.core.errors import ApplianceError
from appliance.core.evidence import Evidence


def write(path: Path, verdict: Diagnosis, evidence: Sequence[Evidence], incident: Document | None = None) -> None:
    """Write a new file, whole or not at all, and say on stderr what was taken out of it.

    Raises:
        ApplianceError: it exists already, or cannot be written.
    """
    from appliance.diagnosis.bundle import write_bundle

    if path.exists():
        raise ApplianceError(f"{path} exists already", hint="name another file with --bundle, or remove it")
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        with partial.open("xb") as out:
            redactions = write_bundle(out, verdict, evidence, now_s=time.time(), incident=incident)
        partial.replace(path)
    except OSError as error:
        raise ApplianceError(f"{path} cannot be written: {error.strerror}", hint="name another file with --bundle") from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    words = ", ".join(f"{redaction.count} × {redaction.kind}" for redaction in redactions) or "nothing"
    click.echo(f"wrote {path}; taken out of it: {words} (redacted.txt inside). Look through it before you pass it on.", err=True)
