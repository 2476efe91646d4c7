"""`incidents.db`: incidents, events and the history, in SQLite (WAL) in the state directory.

Written by one worker thread in the order of the calls, so that a slow disk never holds up the loop; a kill -9 loses at most
what was being written. A disk that is full or read-only does not stop the service: what cannot be written is kept in
memory, `problem` says so, and every later call tries again.
"""

from __future__ import annotations

import contextlib
import copy
import json
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from appliance.control.codec import CodecError, from_json, incident_to_json, to_json
from appliance.core.evidence import Evidence
from appliance.core.incident import Incident
from appliance.supervisor.history import History
from appliance.supervisor.waiting import Pending, Waiting, Write

FILE = "incidents.db"
VERSION = 1
MACHINE = "machine"
"""What the memory is kept under."""
KEEP_EVENTS = 10_000
UNSAVED_MAX = 200
CLOSE_TIMEOUT_S = 5.0
TRY_AGAIN_S = 2.0
CACHE_KIB = 256
"""Of pages. What is written is seldom read, and applianced is to stay small."""
SET_ASIDE_MAX = 3
"""Torn databases. A disk that goes on corrupting tears one every few seconds."""
ARGUMENTS_MAX = 100
"""An even number; SQLite's functions take 127, the document being one."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS memory (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS incidents (incident_id TEXT PRIMARY KEY, time_s REAL NOT NULL, cause TEXT NOT NULL, document TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS incidents_by_time ON incidents (time_s);
CREATE TABLE IF NOT EXISTS events (id INTEGER PRIMARY KEY, time_s REAL NOT NULL, kind TEXT NOT NULL, text TEXT NOT NULL);
"""

# A list is of hundreds, and each may have a hundred kilobytes of evidence: they never become objects of ours. One that a bad disk
# has damaged hides no other: SQLite's functions raise for it, and CASE alone promises that they are not called first.
_SOUND = "CASE WHEN json_valid(document) THEN json_extract(document, '$.incident_id') = incident_id{} END"
_LIST = f"SELECT json_set(document, '$.evidence', json('[]'), '$.flight', NULL) FROM incidents WHERE {_SOUND} ORDER BY rowid DESC LIMIT ?"
_DAMAGED = frozenset((sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB))

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Memory:
    """What survives a restart of applianced and a reboot. `settings` names the configuration that the history is about."""

    history: History = field(default_factory=History)
    generation: int = 0
    settings: str = ""


class IncidentStore:
    """What is kept, in the words of whoever keeps it. `card`: of whose engine; empty: of the whole box.

    With an engine on each card each has a store of its own over the one database: its own memory, its own incidents among the others.
    """

    def __init__(self, state_dir: Path, keep: int) -> None:
        self._database = _Database(state_dir / FILE)
        self._keep = keep
        self._unsaved: OrderedDict[str, Document] = OrderedDict()
        self._unsaved_lock = threading.Lock()
        self._whole: IncidentStore | None = None
        self.card = ""

    def of_card(self, address: str) -> IncidentStore:
        """That of one engine of several. It is closed with this one."""
        narrowed = copy.copy(self)
        narrowed.card, narrowed._whole = address, self.whole
        return narrowed

    @property
    def whole(self) -> IncidentStore:
        """That of the box."""
        return self._whole or self

    @property
    def problem(self) -> str | None:
        """Why the database cannot be used now; None while it can."""
        return self._database.problem

    @property
    def folder(self) -> Path:
        """The state folder."""
        return self._database.path.parent

    def load(self) -> Memory:
        """Blocking, once, at the start. An unusable database is an empty memory and a `problem`."""
        document = self.recall(MACHINE)
        try:
            return from_json(Memory, document) if document else Memory()
        except CodecError:
            return Memory()  # written by another version: nothing is held against any rung

    def remember(self, memory: Memory) -> None:
        """Replace the memory."""
        self.keep(MACHINE, cast(Document, to_json(memory)))

    def keep(self, key: str, document: Document) -> None:
        """Something else to remember, under a name of its own."""
        text = json.dumps(document)
        name = self._named(key)
        self._database.write(lambda db: db.execute("INSERT OR REPLACE INTO memory VALUES (?, ?)", (name, text)), memory=name)

    def recall(self, key: str) -> Document:
        """What was kept under this name; empty where nothing was. Blocking, at the start."""
        rows = self._database.read("SELECT value FROM memory WHERE key = ?", (self._named(key),))
        return rows[0] if rows else {}

    def recall_all(self, prefix: str) -> list[Document]:
        """All that was kept under names that begin so. Blocking, at the start."""
        return self._database.read("SELECT value FROM memory WHERE substr(key, 1, ?) = ?", (len(self._named(prefix)), self._named(prefix)))

    def record(self, incident: Incident) -> None:
        """Keep an incident; the oldest beyond diagnosis.keep_incidents go."""
        self._store(incident_to_json(incident))

    def recovered(self, incident_id: str, recovered_s: float) -> None:
        """The service came back so long after the incident began."""
        self.amend(incident_id, recovered_s=recovered_s)

    def amend(self, incident_id: str, **fields: Any) -> None:
        """Fields of an incident that were not known yet when it was recorded, as JSON."""
        with self._unsaved_lock:
            if incident_id in self._unsaved:
                self._unsaved[incident_id] |= fields
        self._put(incident_id, "json_set", [(f"$.{name}", value) for name, value in fields.items()])

    def add_evidence(self, incident_id: str, evidence: Sequence[Evidence]) -> None:
        """What was found after the record was made."""
        items = [to_json(item) for item in evidence]
        with self._unsaved_lock:
            if incident_id in self._unsaved:
                self._unsaved[incident_id]["evidence"] = [*self._unsaved[incident_id]["evidence"], *items]
        self._put(incident_id, "json_insert", [("$.evidence[#]", item) for item in items])

    def note(self, kind: str, text: str) -> None:
        """An event for the record: a state entered, a request obeyed."""
        now_s, words = time.time(), f"{self.card} {kind}".strip()

        def insert(db: sqlite3.Connection) -> None:
            db.execute("INSERT INTO events (time_s, kind, text) VALUES (?, ?, ?)", (now_s, words, text[:2000]))
            db.execute("DELETE FROM events WHERE id <= (SELECT MAX(id) FROM events) - ?", (KEEP_EVENTS,))

        self._database.write(insert, minor=True)

    def recent(self, limit: int) -> list[Document]:
        """Newest first, without evidence and flight record. Blocking: call it in a thread."""
        ours = " AND json_extract(document, '$.card') = ?" if self.card else ""
        rows = self._database.read(_LIST.format(ours), (self.card, limit) if self.card else (limit,))
        with self._unsaved_lock:
            # In the order in which they were recorded: the wall clock may have been set back between two of them.
            unsaved = [document for document in [*self._unsaved.values()][::-1] if self.card in ("", document["card"])]
        documents = {document["incident_id"]: document for document in unsaved}
        documents |= {document["incident_id"]: document for document in rows if document["incident_id"] not in documents}
        return [document | {"evidence": [], "flight": None} for document in [*documents.values()][:limit]]

    def one(self, incident_id: str) -> Document | None:
        """Whole; the newest for an empty id; None if there is none. Blocking."""
        if not incident_id:
            newest = self.recent(1)
            return self.one(newest[0]["incident_id"]) if newest else None
        with self._unsaved_lock:
            if incident_id in self._unsaved:
                return self._unsaved[incident_id]
        rows = self._database.read("SELECT document FROM incidents WHERE incident_id = ?", (incident_id,))
        return rows[0] if rows else None

    def try_again(self) -> None:
        """While there is a problem, see now and then whether it is over: not every disk that has room again sees another incident."""
        self._database.try_again()

    def flush(self) -> None:
        """Wait until everything written so far has been tried. Blocking."""
        self._database.flush()

    def close(self) -> None:
        """Write what is left, as far as the disk lets us."""
        self._database.close()

    def _named(self, key: str) -> str:
        return f"{self.card} {key}".strip()

    def _store(self, document: Document) -> None:
        incident_id = document["incident_id"]
        with self._unsaved_lock:
            self._unsaved[incident_id] = document
            while len(self._unsaved) > UNSAVED_MAX:
                self._unsaved.popitem(last=False)
        row = (incident_id, document["time_s"], document["diagnosis"]["cause"], json.dumps(document))

        def insert(db: sqlite3.Connection) -> None:
            db.execute("INSERT OR REPLACE INTO incidents VALUES (?, ?, ?, ?)", row)
            keep = "SELECT incident_id FROM incidents ORDER BY rowid DESC LIMIT ?"
            db.execute(f"DELETE FROM incidents WHERE incident_id NOT IN ({keep})", (self._keep,))

        def saved() -> None:
            with self._unsaved_lock:
                self._unsaved.pop(incident_id, None)

        self._database.write(insert, saved)

    def _put(self, incident_id: str, function: str, values: Sequence[tuple[str, Any]]) -> None:
        """Into a document, by one of SQLite's functions: a hundred kilobytes of evidence do not become objects for one more field."""
        arguments = [argument for path, value in values for argument in (path, json.dumps(value))]

        def update(db: sqlite3.Connection) -> None:
            for start in range(0, len(arguments), ARGUMENTS_MAX):
                some = arguments[start : start + ARGUMENTS_MAX]
                changed = f"{function}(document{', ?, json(?)' * (len(some) // 2)})"
                db.execute(
                    f"UPDATE incidents SET document = {changed} WHERE incident_id = ? AND json_valid(document)", (*some, incident_id)
                )

        self._database.write(update)


class _Database:
    """Owns the file and its one worker thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem: str | None = None
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="incidents")
        self._connection: sqlite3.Connection | None = None
        self._waiting = Waiting()
        self._tried_s = 0.0

    def write(self, write: Write, done: Callable[[], object] = lambda: None, *, memory: str = "", minor: bool = False) -> None:
        """In its turn; tried again for as long as the disk does not let us. `memory`, `minor`: see Pending."""

        def write_and_tell(db: sqlite3.Connection) -> None:
            write(db)
            db.commit()
            done()

        self._waiting.add(Pending(write_and_tell, memory, minor))
        self._worker.submit(self._flush)

    def read(self, query: str, arguments: tuple[object, ...]) -> list[Document]:
        """Behind what was written before. Blocking; nothing where the disk does not let us."""
        return self._worker.submit(self._read, query, arguments).result()

    def try_again(self) -> None:
        """See IncidentStore."""
        now_s = time.monotonic()
        if self.problem is not None and now_s - self._tried_s >= TRY_AGAIN_S:
            self._tried_s = now_s
            self._worker.submit(self._flush)

    def flush(self) -> None:
        """See IncidentStore."""
        self._worker.submit(lambda: None).result(CLOSE_TIMEOUT_S)

    def close(self) -> None:
        """See IncidentStore."""
        with contextlib.suppress(TimeoutError):
            self._worker.submit(self._flush_and_close).result(CLOSE_TIMEOUT_S)
        self._worker.shutdown(wait=False, cancel_futures=True)

    # -- on the worker thread ------------------------------------------------------------------------------------------

    def _read(self, query: str, arguments: tuple[object, ...]) -> list[Document]:
        self._flush()
        try:
            return [document for row in self._open().execute(query, arguments) if (document := _document(row[0])) is not None]
        except UnicodeEncodeError:
            return []  # half of a surrogate pair: nothing can have such a name
        except (sqlite3.Error, OSError) as error:
            self._give_up(error)
            return self._read_unwritable(query, arguments)

    def _read_unwritable(self, query: str, arguments: tuple[object, ...]) -> list[Document]:
        """A disk that is full or read-only takes nothing, but what it holds can be read: the rung that was taken, lost cards."""
        for how in ("mode=ro", "mode=ro&immutable=1"):  # the latter leaves a log beside it out: older, and better than nothing
            try:
                with contextlib.closing(sqlite3.connect(f"{self.path.absolute().as_uri()}?{how}", uri=True)) as db:
                    _check_version(db)
                    return [document for row in db.execute(query, arguments) if (document := _document(row[0])) is not None]
            except (sqlite3.Error, OSError):
                continue
        return []

    def _flush(self) -> None:
        try:
            db = self._open()
            while (pending := self._waiting.next()) is not None:
                try:
                    pending.write(db)
                except (sqlite3.Error, OSError):
                    self._waiting.put_back(pending)
                    raise
            self.problem = None
        except (sqlite3.Error, OSError) as error:
            self._give_up(error)

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = _connect(self.path)
        return self._connection

    def _give_up(self, error: Exception) -> None:
        self.problem = f"{self.path} cannot be used ({error}): incidents are kept in memory only"
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGED:
            with contextlib.suppress(OSError):
                _set_aside(self.path)  # found out late: its first page was sound

    def _flush_and_close(self) -> None:
        self._flush()
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _connect(path: Path) -> sqlite3.Connection:
    try:
        return _prepared(path)
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError):
            raise  # full, locked, read-only: the file itself is sound
        _set_aside(path)
        return _prepared(path)


def _set_aside(path: Path) -> None:
    """Not a database, or a torn one: kept beside for whoever wants to look, the last ones; the next connection begins a new one."""
    for old in sorted(path.parent.glob(f"{path.stem}.corrupt-*"))[: 1 - SET_ASIDE_MAX]:
        old.unlink(missing_ok=True)
    path.replace(path.with_suffix(f".corrupt-{int(time.time())}"))
    for side in ("-wal", "-shm"):
        path.with_name(path.name + side).unlink(missing_ok=True)


def _document(text: object) -> Document | None:
    """A row's; None for one that a bad disk, or somebody's hand, has damaged."""
    try:
        document = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _check_version(connection: sqlite3.Connection) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > VERSION:
        raise OSError(f"it was made by a newer version ({version} > {VERSION})")


def _prepared(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=1.0, check_same_thread=False)
    try:
        _check_version(connection)
        connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.executescript(_SCHEMA)
        connection.execute(f"PRAGMA user_version = {VERSION}")
        connection.commit()
    except BaseException:
        connection.close()
        raise
    return connection
