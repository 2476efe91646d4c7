"""What starts and proof runs of this box measured, for plans of its own models: read from the database that applianced keeps."""

from __future__ import annotations

import contextlib
import json
from dataclasses import fields, replace
from pathlib import Path
from urllib.parse import quote

from appliance.cli.place import Place
from appliance.core.errors import ApplianceError, ModelError
from appliance.planner.calibration import PREFIX, Calibration, best_of, calibrated
from appliance.planner.inputs import PlanInputs
from appliance.planner.model_files import model_identity


def known_here(place: Place) -> tuple[Calibration, ...]:
    """All of them, the newest first; none where there is no database, or none that may be read."""
    try:
        path = place.incidents_db()
        if not path.is_file():
            return ()
    except (ApplianceError, OSError):  # a user without a home folder, or without the right to look
        return ()
    import sqlite3  # 5 ms, and most plans are made where nothing was measured

    with contextlib.suppress(sqlite3.Error, ValueError):
        with contextlib.closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=1.0)) as database:
            rows = database.execute("SELECT value FROM memory WHERE substr(key, 1, ?) = ?", (len(PREFIX), PREFIX)).fetchall()
        found = (one for (text,) in rows if (one := _read(text)) is not None)
        return tuple(sorted(found, key=lambda one: one.time_s, reverse=True))
    return ()


def of_model(known: tuple[Calibration, ...], model: Path | str) -> tuple[Calibration, ...]:
    """Those that are about this folder or file, whatever its path was then."""
    try:
        identity = model_identity(model)
    except ModelError:
        return ()
    return tuple(one for one in known if one.model == identity)


def with_measured(inputs: PlanInputs, known: tuple[Calibration, ...]) -> PlanInputs:
    """The inputs with what was measured of this engine with this model on this card, and a sentence that says so."""
    best = best_of(known, inputs, known[0].model) if known else None
    if best is None:
        return inputs
    after = calibrated(inputs, best)
    terms = [term.name for term in fields(after.measured) if term.name != "source"]
    new = [name for name in terms if getattr(after.measured, name) is not None and getattr(inputs.measured, name) is None]
    if not new:
        return inputs
    words = ", ".join(name.removesuffix("_bytes").replace("_", " ") for name in new)
    version = f" {best.engine_version}" if best.engine_version else ""
    told = f"measured on this box with {best.engine}{version}, {best.measured.source}: {words} (--unmeasured leaves it out)"
    return replace(after, assumptions=(*after.assumptions, told))


def _read(text: str) -> Calibration | None:
    from appliance.control.codec import CodecError, from_json

    try:
        return from_json(Calibration, json.loads(text))
    except (CodecError, ValueError):
        return None
