"""What applianced lets people look at: the ladder, the flight recorder, and incidents that anybody may read."""

from __future__ import annotations

import base64
import io
import tarfile
from collections.abc import Callable
from typing import Any

import pytest
import zstandard

from appliance.core.errors import ControlError
from appliance.gpu.nvml import NvmlGpu
from appliance.supervisor.flight_recorder import CardsSample
from appliance.supervisor.views import by_card, why_this_rung
from tests.integration.supervisor.harness import Applianced, wait_for

SECRET = "do not let anybody read this"
LINE = f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.94 GiB. prompt='{SECRET}'"


def test_a_crash_can_be_looked_at_and_taken_along(applianced: Callable[..., Applianced]) -> None:
    """Chain and action without a word of the prompt that the engine printed; Markdown; a bundle that unpacks."""
    box = applianced()
    box.wait_state("serving")
    assert box.ask("timeline") == {"incidents": []}
    box.fault(kind="script", steps=[{"kind": "log", "text": LINE}, {"kind": "signal", "signal": "SIGKILL"}])
    (listed,) = box.wait_incident()
    incident_id = listed["incident_id"]
    wait_for(lambda: box.ask("timeline")["incidents"][0]["recovered_s"] is not None, "the recovery is noted")
    (told,) = box.ask("timeline", limit=1)["incidents"]
    assert (told["incident_id"], told["diagnosis"]["cause"]) == (incident_id, listed["diagnosis"]["cause"])
    assert "evidence" not in told
    dossier = box.ask("dossier", id=incident_id, bundle=True)
    assert incident_id in dossier["markdown"]
    assert "serving again after" in dossier["markdown"]
    packed = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(base64.b64decode(dossier["bundle"]))).read()
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        files = {member.name: tar.extractfile(member).read().decode() for member in tar}  # type: ignore[union-attr]
    assert any(name.endswith("report.md") for name in files)
    assert SECRET in str(box.ask("incident", id=incident_id)), "the owner's own record is whole"
    for text in (str(told), dossier["markdown"], *files.values()):
        assert SECRET not in text
    assert "bundle" not in box.ask("dossier", id=incident_id)


def test_the_ladder_says_which_rung_and_why(applianced: Callable[..., Applianced]) -> None:
    """All rungs, the one in force, and what starts measured."""
    box = applianced()
    status = box.wait_state("serving")
    ladder = box.ask("ladder")
    assert [rung["index"] for rung in ladder["rungs"]] == list(range(status["rungs"]))
    assert (ladder["in_force"], ladder["why"]) == (0, "the setting that is configured")
    assert "weight_bytes" in ladder["measured"]


def test_the_flight_recorder_gives_what_is_new(applianced: Callable[..., Applianced]) -> None:
    """By column; a second question gives only what came after the first."""
    box = applianced()
    box.wait_state("serving")
    first = wait_for(lambda: (found := box.ask("flight"))["samples"]["time_s"] and found, "a sample")
    last_s = first["samples"]["time_s"][-1]
    later = wait_for(lambda: (found := box.ask("flight", since_s=last_s))["samples"]["time_s"] and found, "a later sample")
    assert min(later["samples"]["time_s"]) > last_s
    columns = [column for column in later["samples"].values() if isinstance(column, list)]
    assert {len(column) for column in columns} == {len(later["samples"]["time_s"])}


WRONG: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("flight", {"since_s": "now"}, "no number of seconds"),
    ("timeline", {"limit": 0}, "no number from 1"),
    ("timeline", {"limit": True}, "no number from 1"),
    ("dossier", {}, "names no incident"),
    ("dossier", {"id": "inc-0"}, "no incident 'inc-0'"),
    ("ladder", {"rung": 1}, "unknown argument 'rung'"),
)


def test_wrong_questions_are_named(applianced: Callable[..., Applianced]) -> None:
    """With the value and what it should be."""
    box = applianced()
    wait_for(box.status, "applianced listens")
    for verb, arguments, words in WRONG:
        with pytest.raises(ControlError, match=words):
            box.ask(verb, **arguments)


def test_why_a_rung_is_in_force() -> None:
    """The incident that led there, the cards that are missing, or a person."""

    ours = "restarted on the safer rung 1 (gives up time to the first token: prompts are read slowly) because of prompt='a b c'"

    def moved(before: int, after: int, basis: str) -> dict[str, Any]:
        return {"rung_before": before, "rung_after": after, "action": {"basis": basis}, "incident_id": "inc-1"}

    newest_first = [moved(1, 1, "restarted on rung 1"), moved(0, 1, "restarted on rung 1 because it ran out of memory")]
    assert why_this_rung(1, None, newest_first) == "restarted on rung 1 because it ran out of memory (inc-1)"
    told = why_this_rung(1, None, [moved(0, 1, ours)])
    assert "first token: prompts are read slowly" in told
    assert "a b c" not in told
    assert why_this_rung(2, None, newest_first).startswith("a person chose it")
    assert why_this_rung(2, 0, newest_first) == "rung 0 needs more cards than can be used now"
    assert why_this_rung(0, None, newest_first) == "the setting that is configured"


def test_cards_are_told_one_by_one() -> None:
    """One that stopped answering has fewer samples, and keeps them."""
    both = CardsSample(1.0, (NvmlGpu(address="01", used_bytes=5, pcie_width=16), NvmlGpu(address="02", used_bytes=6)))
    first, second = by_card([both, CardsSample(2.0, (NvmlGpu(address="01", used_bytes=7, pcie_width=8),))])
    assert (first["time_s"], first["used_bytes"], first["pcie_width"]) == ([1.0, 2.0], [5, 7], [16, 8])
    assert (second["time_s"], second["used_bytes"], second["pcie_width"]) == ([1.0], [6], [None])
