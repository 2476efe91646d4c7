"""The incidents of this box: from applianced, or straight from its database while it is down."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from pathlib import Path
from typing import Any
from urllib.parse import quote

from appliance.cli.place import Place
from appliance.control import client
from appliance.core.errors import ApplianceError, NotPermitted, Unreachable

Document = dict[str, Any]
"""An Incident as control/codec.py writes it."""


def recent(place: Place, limit: int) -> list[Document]:
    """Newest first, without evidence.

    Raises:
        Unreachable: applianced is down and there is no database either.
        NotPermitted: we may ask neither.
    """
    try:
        answer = client.ask(place.control_socket(), "incidents", limit=limit)
    except Unreachable as error:
        rows = _read(place, "SELECT document FROM incidents ORDER BY rowid DESC LIMIT ?", (limit,), error)
        return [row | {"evidence": [], "flight": None} for row in rows]
    incidents: list[Document] = answer["incidents"]
    return incidents


def one(place: Place, incident_id: str = "") -> Document | None:
    """One with its evidence, the newest for an empty id; None where there is none.

    Raises:
        Unreachable, NotPermitted: as `recent`.
        ControlError: applianced knows no such incident.
    """
    if not incident_id:
        newest = recent(place, 1)
        return one(place, newest[0]["incident_id"]) if newest else None
    try:
        incident: Document = client.ask(place.control_socket(), "incident", id=incident_id)["incident"]
    except Unreachable as error:
        rows = _read(place, "SELECT document FROM incidents WHERE incident_id = ?", (incident_id,), error)
        return rows[0] if rows else None
    return incident


def _read(place: Place, query: str, arguments: tuple[object, ...], unreachable: Unreachable) -> list[Document]:
    path = place.incidents_db()
    if not _may_look(path):
        raise unreachable
    # mode=ro: never a new file, never a change. The database may be in use by an applianced that hangs.
    try:
        with contextlib.closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=5.0)) as database:
            return [json.loads(row[0]) for row in database.execute(query, arguments)]
    except (sqlite3.Error, ValueError) as error:
        raise ApplianceError(
            f"applianced does not answer and {path} cannot be read: {error}", hint="start applianced: it repairs or replaces the file"
        ) from error


def _may_look(path: Path) -> bool:
    """False where there is no database. Raises NotPermitted."""
    try:
        path.stat()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise NotPermitted(f"{path}: {error.strerror}", hint="run as root or join the group llm-appliance") from None
    if not os.access(path, os.R_OK):
        raise NotPermitted(f"{path}: permission denied", hint="run as root or join the group llm-appliance")
    return True
