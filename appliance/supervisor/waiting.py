"""What waits to be written to the database: in order, bounded, and the last word on everything kept however long the disk says no."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass

WAITING_MAX = 200
Write = Callable[[sqlite3.Connection], object]


@dataclass(frozen=True, slots=True)
class Pending:
    """One write.

    Attributes:
        memory: what it replaces: a later one of this name is all that is left of both. Empty: it adds something.
        minor: the first to be given up when there is no room: events for the record.
    """

    write: Write
    memory: str = ""
    minor: bool = False


class Waiting:
    """Owns the queue. Filled by the loop, emptied by the database's thread."""

    def __init__(self) -> None:
        self._pending: list[Pending] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, fresh: Pending) -> None:
        """Behind all others. An hour without room is thousands of notes that we live, and one history: they may not push it out."""
        with self._lock:
            if fresh.memory:
                self._pending = [old for old in self._pending if old.memory != fresh.memory]
            self._pending.append(fresh)
            if len(self._pending) > WAITING_MAX:
                self._pending.remove(self._least())

    def next(self) -> Pending | None:
        """The first; None where all is written."""
        with self._lock:
            return self._pending.pop(0) if self._pending else None

    def put_back(self, failed: Pending) -> None:
        """In front again; but nothing where it has been replaced meanwhile."""
        with self._lock:
            if not failed.memory or all(later.memory != failed.memory for later in self._pending):
                self._pending.insert(0, failed)

    def _least(self) -> Pending:
        """The oldest event, else the oldest incident; memories are few."""
        return min(self._pending, key=lambda pending: (bool(pending.memory), not pending.minor))
