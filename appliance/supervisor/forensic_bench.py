"""The instruments themselves: fitted to a start, looked at after a crash, and taken off again."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import structlog

from appliance.backends.forensics import CUDA_PREFIX, NCCL_PREFIX, instruments
from appliance.control.codec import CodecError, from_json, to_json
from appliance.core.diagnosis import Diagnosis
from appliance.core.evidence import Evidence, Source
from appliance.core.launch import LaunchSpec
from appliance.core.units import format_bytes
from appliance.diagnosis.dumps import stacks_in
from appliance.diagnosis.nccl_trace import TraceError, read_trace
from appliance.supervisor.forensics import Suspicions
from appliance.supervisor.incidents import IncidentStore

KEY = "forensics"
KEPT_FOLDERS = 3
TRACE_MAX_BYTES = 64 * 1024**2

log = structlog.get_logger()


class ForensicBench:
    """Owns the folder of what was caught, and what is remembered of unexplained crashes."""

    def __init__(self, store: IncidentStore, folder: Path) -> None:
        self._store = store
        self._folder = folder
        try:
            self._suspicions = from_json(Suspicions, store.recall(KEY))
        except CodecError:
            self._suspicions = Suspicions()
        self._costs = ""

    @property
    def sensor(self) -> dict[str, object]:
        """For the status."""
        if not self._suspicions.wanted:
            return {"ok": True, "detail": "off: they go on after a second unexplained crash of one kind"}
        costs = f" ({self._costs})" if self._costs else ""
        return {"ok": True, "detail": f"on since an unexplained crash came again: {self._suspicions.wanted}{costs}"}

    def crashed(self, diagnosis: Diagnosis, evidence: Sequence[Evidence]) -> None:
        """One more crash is known."""
        self._become(self._suspicions.after_crash(diagnosis, evidence))

    def stable(self) -> None:
        """An hour of service."""
        self._become(self._suspicions.after_stable_time())

    def fit(self, spec: LaunchSpec, generation: int) -> LaunchSpec:
        """The spec with its instruments, while they are wanted. A folder that cannot be made is told, and left out."""
        if not self._suspicions.wanted:
            return spec
        place = self._folder / str(generation)
        fitted = instruments(spec.engine, str(place))
        self._costs = fitted.costs
        spare = spec.spare and replace(spec.spare, env={**spec.spare.env, **fitted.env}, forensic=True)
        note = (
            f"forensic instruments are switched on for this start because the same unexplained crash came twice "
            f"({self._suspicions.wanted}): {', '.join(sorted(fitted.env))} and core files; they cost {fitted.costs}, and go off when "
            f"they have caught something or after supervisor.stable_after_s of service"
        )
        # Somebody's own command may be written for the folder that it is started in.
        cwd = spec.cwd if spec.engine == "custom" else str(place)
        return replace(spec, env={**spec.env, **fitted.env}, cwd=cwd, spare=spare, forensic=str(place), notes=(*spec.notes, note))

    def make_room(self, spec: LaunchSpec) -> LaunchSpec:
        """Its folder, and the oldest ones gone; what cannot have one is started without."""
        if not spec.forensic:
            return spec
        try:
            Path(spec.forensic).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            log.warning("the instruments have no folder to write to", folder=spec.forensic, error=error.strerror)
            return replace(spec, cwd=str(self._folder.parent), forensic="")
        for old in sorted(self._folder.iterdir(), key=lambda place: int(place.name) if place.name.isdecimal() else 0)[:-KEPT_FOLDERS]:
            shutil.rmtree(old, ignore_errors=True)
        return spec

    def gather(self, spec: LaunchSpec, lines: Sequence[str]) -> list[Evidence]:
        """What a life that was fitted left behind, as evidence. Reads files: for a thread."""
        if not spec.forensic:
            return []
        found: list[Evidence] = []
        with contextlib.suppress(OSError):
            for file in sorted(Path(spec.forensic).iterdir()):
                found += (
                    _cuda_dump(file) if file.name.startswith(CUDA_PREFIX) else _trace(file) if file.name.startswith(NCCL_PREFIX) else []
                )
        said = [Evidence(Source.STACK, text, data={"kind": "faulthandler"}) for text in stacks_in(lines)]
        return [*found, *said]

    def caught(self, incident_id: str, count: int) -> None:
        """Something was: off again."""
        if self._suspicions.wanted:
            log.info("forensic instruments are switched off again: they have caught something", incident=incident_id, pieces=count)
            self._become(self._suspicions.after_catch())

    def _become(self, after: Suspicions) -> None:
        if after == self._suspicions:
            return
        if after.wanted and not self._suspicions.wanted:
            log.warning("an unexplained crash has come again: the next start has forensic instruments", signature=after.wanted)
        self._suspicions = after
        self._store.keep(KEY, to_json(after))


def _cuda_dump(file: Path) -> list[Evidence]:
    status = file.stat()
    how = f"cuda-gdb -batch -ex 'target cudacore {file}' names the kernel and its line"
    text = f"CUDA core dump {file} ({format_bytes(status.st_size)}): {how}"
    return [Evidence(Source.CORE_DUMP, text, status.st_mtime, data={"kind": "cuda"})]


def _trace(file: Path) -> list[Evidence]:
    status = file.stat()
    try:
        texts = read_trace(file.read_bytes()) if status.st_size <= TRACE_MAX_BYTES else ["it is larger than 64 MiB and was not read"]
    except TraceError as error:
        texts = [str(error)]
    return [Evidence(Source.STACK, f"NCCL trace {file.name}: {text}", status.st_mtime, data={"kind": "nccl"}) for text in texts]
