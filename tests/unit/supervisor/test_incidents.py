"""The database: what it keeps, and what it does when the disk does not let it."""

from __future__ import annotations

import os
import resource
import signal
import sqlite3
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.control.codec import incident_from_json
from appliance.core.action import Action, ActionKind
from appliance.core.causes import Cause
from appliance.core.evidence import Evidence, Source
from appliance.core.incident import Incident
from appliance.supervisor.history import History, Phase
from appliance.supervisor.incidents import FILE, IncidentStore, Memory
from tests.fakes.small_disk import NEEDS_ROOT, fill, small_disk
from tests.unit.supervisor.machine_cases import LADDER, make_diagnosis


def make_incident(number: int) -> Incident:
    """One of a series."""
    return Incident(
        incident_id=f"inc-{number:04}",
        time_s=1000.0 + number,
        generation=number,
        engine="native",
        engine_version="0",
        model="demo",
        phase="serving",
        diagnosis=make_diagnosis(Cause.SEGFAULT_NATIVE),
        action=Action(ActionKind.RESTART_SAME, "restarted because"),
        evidence=(Evidence(Source.ENGINE_LOG, "boom", 1.0, 3, data={"a": 1}),),
    )


@contextmanager
def opened(folder: Path, keep: int = 100) -> Iterator[IncidentStore]:
    """A store that is closed at the end."""
    store = IncidentStore(folder, keep)
    try:
        yield store
    finally:
        store.close()


@contextmanager
def within(most_bytes: int) -> Iterator[None]:
    """No more memory than that is allocated in the block, at any moment."""
    tracemalloc.start()
    try:
        yield
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < most_bytes


def test_an_incident_survives_a_restart_whole(tmp_path: Path) -> None:
    """What is read after applianced was restarted is what was recorded, recovery included."""
    with opened(tmp_path) as store:
        store.record(make_incident(1))
        store.recovered("inc-0001", 1.5)
    with opened(tmp_path) as store:
        document = store.one("inc-0001")
        assert document is not None
        incident = incident_from_json(document)
        assert incident.recovered_s == 1.5
        assert incident.evidence == make_incident(1).evidence
        assert store.one("") == document
        assert store.one("inc-9999") is None


def test_lists_are_newest_first_and_without_evidence(tmp_path: Path) -> None:
    """`appliancectl incidents` shows the last ones: as they were recorded, for the wall clock may have been set back in between."""
    with opened(tmp_path) as store:
        for number in (2, 3, 1):
            store.record(make_incident(number))
        listed = store.recent(2)
        assert [document["incident_id"] for document in listed] == ["inc-0001", "inc-0003"]
        assert all(document["evidence"] == [] for document in listed)


def test_a_list_does_not_bring_the_evidence_into_memory(tmp_path: Path) -> None:
    """Hundreds of incidents with a hundred kilobytes each would stay in applianced's resident memory for good."""
    with opened(tmp_path) as store:
        for number in range(20):
            store.record(make_incident(number))
            store.amend(make_incident(number).incident_id, evidence=[{"text": "x" * 1000, "line": line} for line in range(500)])
        store.flush()
        with within(2**20):
            listed = store.recent(100)
    assert [document["evidence"] for document in listed] == [[]] * 20


def test_much_evidence_is_added_in_order(tmp_path: Path) -> None:
    """A stack dump has more lines than a function of SQLite has arguments."""
    incident = make_incident(1)
    lines = [Evidence(Source.ENGINE_LOG, f"frame {number}", float(number)) for number in range(170)]
    with opened(tmp_path) as store:
        store.record(incident)
        store.flush()
        store.add_evidence(incident.incident_id, lines)
        store.flush()
        document = store.one(incident.incident_id)
    assert document is not None
    assert incident_from_json(document).evidence == (*incident.evidence, *lines)


def test_adding_evidence_does_not_bring_the_document_into_memory(tmp_path: Path) -> None:
    """A quarter of an hour of samples and a hundred kilobytes of lines would become objects for one line more."""
    incident = make_incident(1)
    with opened(tmp_path) as store:
        store.record(incident)
        store.amend(incident.incident_id, flight={"time_s": [float(number) for number in range(50_000)]})
        store.flush()
        with within(2**18):
            store.add_evidence(incident.incident_id, [Evidence(Source.ENGINE_LOG, "one more", 1.0)])
            store.amend(incident.incident_id, recovered_s=2.0)
            store.flush()


def test_the_oldest_are_pruned(tmp_path: Path) -> None:
    """diagnosis.keep_incidents bounds the file."""
    with opened(tmp_path, keep=3) as store:
        for number in range(10):
            store.record(make_incident(number))
        assert [document["incident_id"] for document in store.recent(100)] == ["inc-0009", "inc-0008", "inc-0007"]


def test_history_and_generation_survive(tmp_path: Path) -> None:
    """The rungs that were taken, the counters and the generation are what they were."""
    off = replace(LADDER[2], features_off=frozenset({"cuda_graph", "overlap_schedule"}), gives_up="decode speed", draft_tokens=2)
    history = History(rung=2).standing_on((*LADDER[:2], off)).with_failure(Cause.CUDA_OOM_PREFILL, Phase.SERVING, off)
    memory = Memory(history, 7, "abc")
    with opened(tmp_path) as store:
        assert store.load() == Memory()
        store.remember(memory)
    with opened(tmp_path) as store:
        assert store.load() == memory


def test_a_state_folder_that_cannot_be_used_is_no_crash(tmp_path: Path) -> None:
    """No folder: incidents are kept in memory and the problem says so; when the folder appears they are written."""
    folder = tmp_path / "later"
    with opened(folder) as store:
        assert store.load() == Memory()
        store.record(make_incident(1))
        store.recovered("inc-0001", 2.0)
        assert [document["incident_id"] for document in store.recent(5)] == ["inc-0001"]
        assert store.problem is not None
        assert "in memory only" in store.problem
        folder.mkdir()
        store.note("test", "the folder is there")
        store.flush()
        assert store.problem is None
    with opened(folder) as store:
        document = store.one("inc-0001")
        assert document is not None
        assert document["recovered_s"] == 2.0


def test_hours_without_room_push_out_nothing_that_counts(tmp_path: Path) -> None:
    """Each half minute it is noted that we live: by thousands, and the rung that was taken and the incident are written in the end."""
    folder = tmp_path / "later"
    memory = Memory(History(rung=2), 9, "abc")
    with opened(folder) as store:
        store.load()
        store.remember(replace(memory, generation=8))
        store.record(make_incident(1))
        store.remember(memory)
        for number in range(600):
            store.keep("run", {"heard_s": number})
            store.note("serving", "as before")
        store.recovered("inc-0001", 2.0)
        store.flush()
        folder.mkdir()
        store.note("test", "there is room again")
        store.flush()
        assert store.problem is None
    with opened(folder) as store:
        document = store.one("inc-0001")
        assert document is not None
        assert document["recovered_s"] == 2.0
        assert store.load() == memory
        assert store.recall("run") == {"heard_s": 599}


@NEEDS_ROOT
@pytest.mark.parametrize("trouble", ["full", "read-only"])
def test_what_is_on_a_disk_that_takes_nothing_is_read(tmp_path: Path, trouble: str) -> None:
    """applianced begins on a disk that is full, or that the kernel has made read-only after an error: on the rung that it was on."""
    memory = Memory(History(rung=2), 9, "abc")
    with small_disk(tmp_path / "disk", "size=512k") as disk:
        with opened(disk) as store:
            store.record(make_incident(1))
            store.remember(memory)
        if trouble == "full":
            fill(disk)
        else:
            subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        with opened(disk) as store:
            assert store.load() == memory
            assert [document["incident_id"] for document in store.recent(9)] == ["inc-0001"]
            store.note("test", "there is no room")
            store.flush()
            assert store.problem is not None


def test_a_full_disk_is_survived(tmp_path: Path) -> None:
    """ENOSPC (here: EFBIG by a file size limit, in a process of its own) degrades to memory, and recovers when there is room."""
    script = (
        "import resource, signal, sys\nfrom pathlib import Path\n"
        "from tests.unit.supervisor.test_incidents import IncidentStore, make_incident\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "store = IncidentStore(Path(sys.argv[1]), 100)\nstore.load()\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))\n"
        "for n in range(20): store.record(make_incident(n))\n"
        "store.flush(); print(store.problem); print(len(store.recent(50)))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
        "store.note('x', 'y'); store.flush(); print(store.problem); print(len(store.recent(50)))\n"
        "store.close()\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, env=environment, timeout=60, check=True
    )
    problem, kept, after, kept_after = run.stdout.splitlines()
    assert "in memory only" in problem
    assert (kept, after, kept_after) == ("20", "None", "20")
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_a_torn_database_is_set_aside(tmp_path: Path) -> None:
    """Garbage instead of a database: a new one is begun, the old one kept beside it."""
    (tmp_path / FILE).write_bytes(b"this is no database, it only looks like a file" * 100)
    with opened(tmp_path) as store:
        assert store.load() == Memory()
        store.record(make_incident(1))
        assert store.one("inc-0001") is not None
        assert store.problem is None
    assert list(tmp_path.glob("incidents.corrupt-*"))


def test_a_disk_that_goes_on_corrupting_does_not_fill_up(tmp_path: Path) -> None:
    """Of the databases that were set aside the last three stay."""
    for number in range(1000000001, 1000000007):
        (tmp_path / f"incidents.corrupt-{number}").write_bytes(b"torn")
    (tmp_path / FILE).write_bytes(b"this is no database, it only looks like a file" * 100)
    with opened(tmp_path) as store:
        assert store.problem is None
    kept = sorted(path.name for path in tmp_path.glob("incidents.corrupt-*"))
    assert kept[:2] == ["incidents.corrupt-1000000005", "incidents.corrupt-1000000006"]
    assert len(kept) == 3


def test_a_database_that_is_damaged_further_on_is_set_aside(tmp_path: Path) -> None:
    """Its first page is sound, so that it opens: nothing could be kept in it any more, over any restart."""
    with opened(tmp_path) as store:
        for number in range(100):
            store.record(make_incident(number))
    pages = bytearray((tmp_path / FILE).read_bytes())
    pages[4096:] = b"\xa5" * (len(pages) - 4096)
    (tmp_path / FILE).write_bytes(pages)
    with opened(tmp_path) as store:
        assert store.load() == Memory()
        assert store.problem is not None
        store.remember(Memory(generation=3))
        store.record(make_incident(100))
        store.flush()
        assert store.problem is None
    with opened(tmp_path) as store:
        assert store.load().generation == 3
        assert [document["incident_id"] for document in store.recent(9)] == ["inc-0100"]
    assert list(tmp_path.glob("incidents.corrupt-*"))


@pytest.mark.parametrize("damaged", ['{"incident_id": "inc-0001", "x": NaN}', '{"incident_id', "[]", "", b"\xff"])
def test_a_damaged_incident_hides_no_other(tmp_path: Path, damaged: str | bytes) -> None:
    """It is not listed; it can be asked for, and what is found out about it later holds up nothing that is written behind it."""
    with opened(tmp_path) as store:
        for number in range(3):
            store.record(make_incident(number))
    database = sqlite3.connect(tmp_path / FILE)
    database.execute("UPDATE incidents SET document = ? WHERE incident_id = 'inc-0001'", (damaged,))
    database.execute("INSERT INTO memory VALUES ('notes', ?)", (damaged,))
    database.commit()
    database.close()
    with opened(tmp_path) as store:
        store.recovered("inc-0001", 2.0)
        store.record(make_incident(3))
        assert [document["incident_id"] for document in store.recent(9)] == ["inc-0003", "inc-0002", "inc-0000"]
        store.one("inc-0001")
        assert store.one("half of a pair: \ud800") is None
        store.recall("notes")
        assert store.problem is None
    with opened(tmp_path) as store:
        assert store.one("inc-0003") is not None


def test_a_newer_database_is_left_alone(tmp_path: Path) -> None:
    """After a downgrade the file of the newer version is neither read nor changed."""
    database = sqlite3.connect(tmp_path / FILE)
    database.execute("PRAGMA user_version = 99")
    database.commit()
    database.close()
    before = (tmp_path / FILE).read_bytes()
    with opened(tmp_path) as store:
        store.record(make_incident(1))
        store.flush()
        assert store.problem is not None
        assert "newer version" in store.problem
    assert (tmp_path / FILE).read_bytes() == before


def test_kill_nine_at_any_moment_leaves_a_sound_database(tmp_path: Path) -> None:
    """Killed while writing as fast as it can: the database is sound, and at most the last write is missing."""
    script = (
        "import sys\nfrom pathlib import Path\n"
        "from tests.unit.supervisor.test_incidents import IncidentStore, make_incident\n"
        "store = IncidentStore(Path(sys.argv[1]), 10**6)\n"
        "n = 0\n"
        "while True:\n    store.record(make_incident(n)); store.flush(); print(n, flush=True); n += 1\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    for _ in range(3):
        child = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment)
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(0.05)
        child.send_signal(signal.SIGKILL)
        told = [int(line) for line in child.stdout.read().splitlines()]
        child.wait()
        with opened(tmp_path, keep=10**6) as store:
            stored = {document["incident_id"] for document in store.recent(10**6)}
            assert store.problem is None
        assert {f"inc-{n:04}" for n in told} <= stored
        assert sqlite3.connect(tmp_path / FILE).execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_engines_of_several_cards_share_a_database_and_nothing_else(tmp_path: Path) -> None:
    """Each has its memory, its notes and its incidents; the box sees all incidents, newest first, and one of them by its name."""
    with opened(tmp_path) as box:
        first, second = box.of_card("0000:01:00"), box.of_card("0000:02:00")
        for number, store in enumerate((first, second, box, first)):
            store.record(replace(make_incident(number), card=store.card))
        first.remember(Memory(History(rung=1), 3, "abc"))
        second.keep("forensics", {"a": 1})
        listed = [[document["incident_id"][-1] for document in store.recent(9)] for store in (box, first, second)]
    assert listed == [["3", "2", "1", "0"], ["3", "0"], ["1"]]
    with opened(tmp_path) as box:
        first, second = box.of_card("0000:01:00"), box.of_card("0000:02:00")
        assert (first.load().generation, second.load(), box.load()) == (3, Memory(), Memory())
        assert (first.recall("forensics"), second.recall("forensics")) == ({}, {"a": 1})
        assert second.recall_all("foren") == [{"a": 1}]
        assert (first.whole is box, box.whole is box, first.folder == box.folder) == (True, True, True)
        found = second.one("inc-0003")
        assert found is not None
        assert found["card"] == "0000:01:00"
        assert [document["incident_id"][-1] for document in second.recent(9)] == ["1"]


def test_on_a_full_disk_each_still_sees_its_own(tmp_path: Path) -> None:
    """What could not be written is kept for all of them in one place; the problem is everybody's."""
    with opened(tmp_path / "gone") as box:
        first, second = box.of_card("0000:01:00"), box.of_card("0000:02:00")
        first.record(replace(make_incident(1), card=first.card))
        first.recovered("inc-0001", 2.0)
        assert [document["recovered_s"] for document in first.recent(9)] == [2.0]
        assert second.recent(9) == []
        assert [document["card"] for document in box.recent(9)] == ["0000:01:00"]
        assert second.problem is not None
        assert second.problem == box.problem
