"""The seam for what good starts taught: measured terms as records, kept by card, engine version and model. Who keeps them is not here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace

from appliance.planner.inputs import Measured, PlanInputs

_COUNTED = tuple(f.name for f in fields(Measured) if f.name != "source")


def calibration_key(gpu_uuid: str, engine: str, engine_version: str, model: str, tensor_parallel: int = 1) -> str:
    """What measured terms hold for: another card, engine version, model or number of cards has its own."""
    return "/".join((gpu_uuid or "any-card", engine, engine_version or "any-version", f"tp{tensor_parallel}", model))


def to_record(measured: Measured) -> dict[str, object]:
    """For JSON."""
    return asdict(measured)


def from_record(record: Mapping[str, object]) -> Measured:
    """The inverse; what is no whole number of bytes is as if it had not been measured (an older or a damaged record)."""
    sizes = {name: record.get(name) for name in _COUNTED}
    kept = {name: size for name, size in sizes.items() if isinstance(size, int) and not isinstance(size, bool) and size >= 0}
    source = record.get("source")
    return Measured(**kept, source=source if isinstance(source, str) else "an earlier start")


def calibrated(inputs: PlanInputs, measured: Measured) -> PlanInputs:
    """The inputs for the next plan: what earlier starts measured, except the pool, which the next plan is to choose.

    What a person gave stays.
    """
    given = inputs.measured
    known = {name: getattr(measured, name) for name in _COUNTED if getattr(given, name) is None and name != "kv_pool_bytes"}
    return replace(inputs, measured=replace(given, **known, source=measured.source))
