"""incidents and `diagnose` without a file: from applianced, and from the database while it is down."""

import json
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from appliance import __version__
from appliance.control.codec import incident_to_json
from appliance.core.causes import Cause
from appliance.core.diagnosis import ChainLink, Citation, Confidence, Diagnosis, Role
from appliance.core.evidence import Evidence, Source
from appliance.core.flight import FlightRecord, FlightSample
from appliance.supervisor.incidents import IncidentStore


@pytest.fixture
def kept(tmp_path: Path, incident) -> Path:
    """A state folder in which applianced kept three incidents before it ended."""
    store = IncidentStore(tmp_path, keep=100)
    store.load()
    for number in (1, 2, 3):
        store.record(incident(number, recovered_s=None if number == 3 else 1.25))
    store.flush()
    store.close()
    return tmp_path


def test_incidents_are_listed_newest_first(ctl, kept: Path) -> None:
    """A line each."""
    said = ctl("--state-dir", kept, "incidents")
    assert said.code == 0
    lines = said.out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == [f"inc-20231114-22132{number}-abcd" for number in (3, 2, 1)]
    assert lines[1].endswith("cuda_oom_prefill  restart_safer  -")
    assert lines[2].endswith("cuda_oom_prefill  restart_safer  1.25 s")


def test_with_several_engines_the_card_is_named(ctl, applianced, incident) -> None:
    """In the list, and where one is told in full; an incident of before has none."""
    applianced.answers["incidents"] = {"incidents": [incident_to_json(incident(n, card=card)) for n, card in ((2, "0000:02:00"), (1, ""))]}
    applianced.answers["incident"] = {"incident": incident_to_json(incident(2, card="0000:02:00"))}
    head, second, first = ctl("--run-dir", applianced.run_dir, "incidents").out.splitlines()[:3]
    assert head.split()[:3] == ["INCIDENT", "TIME", "CARD"]
    assert "  0000:02:00  cuda_oom_prefill" in second
    assert "  -           cuda_oom_prefill" in first
    assert "with demo on card 0000:02:00, after" in ctl("--run-dir", applianced.run_dir, "diagnose").out
    assert "| card | 0000:02:00 |" in ctl("--run-dir", applianced.run_dir, "diagnose", "--markdown").out


def test_limit_and_json(ctl, kept: Path) -> None:
    """All fields but the evidence."""
    data = json.loads(ctl("--state-dir", kept, "incidents", "--limit", "2", "--json").out)["incidents"]
    assert [incident["generation"] for incident in data] == [3, 2]
    assert data[0]["evidence"] == []
    assert data[0]["diagnosis"]["cause"] == "cuda_oom_prefill"


def test_a_running_applianced_is_asked_first(ctl, applianced, kept: Path, incident) -> None:
    """It may know of an incident that a full disk kept out of the database."""
    applianced.answers["incidents"] = {"incidents": [incident_to_json(incident(9), evidence=False)]}
    data = json.loads(ctl("--run-dir", applianced.run_dir, "--state-dir", kept, "incidents", "--json").out)
    assert [one["generation"] for one in data["incidents"]] == [9]
    assert applianced.asked == [("incidents", {"limit": 20})]


def test_no_incidents_is_good_news(ctl, applianced) -> None:
    """Exit code 0 and a sentence."""
    applianced.answers["incidents"] = {"incidents": []}
    for verb in ("incidents", "diagnose"):
        said = ctl("--run-dir", applianced.run_dir, verb)
        assert (said.code, said.out) == (0, "no incidents: nothing has crashed here\n")


@pytest.mark.parametrize("verb", ["incidents", "diagnose"])
def test_neither_applianced_nor_a_database_is_exit_code_3(ctl, tmp_path: Path, verb: str) -> None:
    """Nothing is known, which is not the same as nothing happened."""
    said = ctl("--state-dir", tmp_path, verb)
    assert (said.code, said.out) == (3, "")


def test_a_database_that_is_none_is_refused_in_words(ctl, tmp_path: Path) -> None:
    """And left as it is."""
    (tmp_path / "incidents.db").write_bytes(b"not a database at all" * 100)
    said = ctl("--state-dir", tmp_path, "incidents")
    assert (said.code, said.out) == (1, "")
    assert "cannot be read: file is not a database" in said.err
    assert (tmp_path / "incidents.db").read_bytes().startswith(b"not a database")


def test_reading_never_writes(ctl, kept: Path) -> None:
    """A database in use by an applianced that hangs is read beside it."""
    writer = sqlite3.connect(kept / "incidents.db")
    writer.execute("BEGIN IMMEDIATE")
    assert ctl("--state-dir", kept, "incidents").code == 0
    writer.rollback()
    writer.close()


def test_diagnose_tells_the_last_incident_in_full(ctl, kept: Path) -> None:
    """When, what ran, the verdict, what was done about it; exit code 1, as something crashed."""
    said = ctl("--state-dir", kept, "diagnose")
    assert said.code == 1
    for words in (
        "inc-20231114-221323-abcd",
        "native 0.1.0 with demo, after 3 min 20 s of service, 1 request in flight",
        "cuda_oom_prefill  (confidence: high)",
        "A prompt needed 48.00 MiB and 5.19 MiB were free.",
        "engine_log:12",
        "engine_rpc_timeout: no time-out before the allocation failed",
        "asked_bytes      48.00 MiB",
        "1. Lower mem_fraction.",
        "The appliance restarted on the safer rung 1 because a prompt did not fit; not serving again yet.",
    ):
        assert words in said.out


def test_another_incident_can_be_named(ctl, kept: Path) -> None:
    """And one that does not exist is said to."""
    said = ctl("--state-dir", kept, "diagnose", "--incident", "inc-20231114-221321-abcd")
    assert said.code == 1
    assert "serving again after 1.25 s" in said.out
    said = ctl("--state-dir", kept, "diagnose", "--incident", "inc-none")
    assert (said.code, said.out) == (1, "")
    assert "there is no incident 'inc-none'" in said.err


def test_diagnose_as_json_says_what_was_done(ctl, kept: Path) -> None:
    """The keys that programs rely on, and the incident's own."""
    data = json.loads(ctl("--state-dir", kept, "diagnose", "--json").out)
    assert {"cause", "confidence", "root", "chain", "refuted", "action", "remedies", "safer_config"} <= set(data)
    assert data["action"] == "restart_safer"
    assert data["root"]["source"] == "engine_log"
    assert data["incident_id"] == "inc-20231114-221323-abcd"


def test_diagnose_as_markdown_can_be_pasted(ctl, kept: Path) -> None:
    """At its head whose incident it is and what ran, at its end what the appliance did: nobody has to ask back."""
    said = ctl("--state-dir", kept, "diagnose", "--markdown")
    assert said.out.startswith("# inc-20231114-221323-abcd: native 0.1.0 with demo\n")
    head = said.out.partition("**cuda_oom_prefill**")[0]
    for row in (
        "| when | 2023-11-14T22:13:23.000Z |",
        "| engine | native 0.1.0 |",
        "| model | demo |",
        f"| appliance | {__version__} |",
        "| generation | 3, after 3 min 20 s of service |",
        "| rung | 0, then 1 |",
        "| in flight | 1 request: /v1/completions with a prompt of 7 tokens, attempt 1, 0.50 s old |",
    ):
        assert row in head
    assert "The appliance restarted on the safer rung 1" in said.out


def test_what_is_for_others_to_read_holds_no_secret(ctl, applianced, incident) -> None:
    """An engine may print a key or a prompt: Markdown and bundle are told without; the owner's own screen is whole."""
    secret = "sk-abcdefghijklmnopqrstuvwxyz012345"
    cited = Citation(Source.ENGINE_LOG, 3, f"RuntimeError: api_key={secret}", 1_700_000_003.0)
    verdict = Diagnosis(Cause.CUDA_ILLEGAL_ACCESS, Confidence.HIGH, "A kernel read where it must not.", cited)
    document = incident_to_json(incident(diagnosis=verdict))
    applianced.answers |= {"incidents": {"incidents": [document]}, "incident": {"incident": document}}
    assert secret in ctl("--run-dir", applianced.run_dir, "diagnose").out
    assert secret not in ctl("--run-dir", applianced.run_dir, "diagnose", "--markdown").out


def test_a_requested_stop_is_no_crash(ctl, applianced, incident) -> None:
    """Exit code 0 for ok_* causes."""
    document = incident_to_json(incident(1, Cause.OK_SHUTDOWN))
    applianced.answers |= {"incidents": {"incidents": [document]}, "incident": {"incident": document}}
    assert ctl("--run-dir", applianced.run_dir, "diagnose").code == 0


def _flight(end_s: float) -> FlightRecord:
    """Five minutes of ordinary load, and a last second with a batch that nothing before had."""
    quiet = [FlightSample(end_s - 300 + second, 0, running=1 + second % 8, kv_blocks_used=10 * (second % 50)) for second in range(299)]
    return FlightRecord.of([*quiet, FlightSample(end_s, 0, running=37, kv_blocks_used=200)])


@pytest.fixture
def recurring(tmp_path: Path, incident) -> Path:
    """Three crashes of one kind at batch 37, and one of another kind in between."""
    store = IncidentStore(tmp_path, keep=100)
    store.load()
    for number in (1, 2, 4):
        store.record(incident(number, flight=_flight(1_700_000_000.0 + number)))
    other = Citation(Source.ENGINE_LOG, 3, "RuntimeError: CUDA error: an illegal memory access was encountered", 1_700_000_003.0)
    store.record(incident(3, diagnosis=Diagnosis(Cause.CUDA_ILLEGAL_ACCESS, Confidence.HIGH, "A kernel read where it must not.", other)))
    store.flush()
    store.close()
    return tmp_path


def test_the_same_crash_is_counted_and_what_sets_it_apart_is_told(ctl, recurring: Path) -> None:
    """Count, last time, root without its numbers, and the batch that only the crashes had."""
    said = ctl("--state-dir", recurring, "incidents", "--patterns")
    assert said.code == 0
    lines = said.out.splitlines()
    assert lines[0].startswith("3 times: cuda_oom_prefill, the last at ")
    assert "inc-20231114-221324-abcd" in lines[0]
    assert any("3 of 3 crashes had running = 37, against 0 of " in line for line in lines)
    assert any(line.startswith("once: cuda_illegal_access, the last at ") for line in lines)


def test_patterns_for_programs(ctl, recurring: Path) -> None:
    """Counts and lift; a crash that happened once shares nothing with itself."""
    kinds = json.loads(ctl("--state-dir", recurring, "incidents", "--patterns", "--json").out)["patterns"]
    assert [(kind["cause"], kind["count"]) for kind in kinds] == [("cuda_oom_prefill", 3), ("cuda_illegal_access", 1)]
    (batch,) = [one for one in kinds[0]["shared"] if (one["feature"], one["value"]) == ("running", "= 37")]
    assert (batch["crashes_with"], batch["crashes"], batch["healthy_with"]) == (3, 3, 0)
    assert batch["lift"] > 100
    assert not [one for one in kinds[0]["shared"] if one["feature"] == "kv_blocks_used" and one["value"] == ">= 200"]
    assert kinds[1]["shared"] == []


CARDS = ("0000:01:00.0 RTX 3090", "0000:21:00.0 RTX 3090", "0000:41:00.0 RTX 3090", "0000:61:00.0 RTX 3090")


def _xid(number: int, card: str) -> dict[str, object]:
    """An incident of a card that fell off the bus under the newer of two drivers, after minutes of work."""
    time_s = 1_700_000_000.0 + number
    text = f"NVRM: Xid (PCI:{card[:12]}): 79, GPU has fallen off the bus."
    root = Citation(Source.KERNEL_LOG, 0, text, time_s)
    fields = {"diagnosis": Diagnosis(Cause.GPU_OFF_BUS, Confidence.HIGH, "The card is gone.", root, (ChainLink(Role.ROOT, "xid", root),))}
    fields["evidence"] = (Evidence(Source.KERNEL_LOG, text, time_s, 0, data={"card": card}),)
    return fields | {"flight": replace(_flight(time_s), driver="560.35", cards=CARDS)}


def test_a_card_and_a_driver_that_crashes_share_are_told(ctl, tmp_path: Path, incident) -> None:
    """Four times the same of four cards, always under the new driver; the other crashes were under the old one."""
    store = IncidentStore(tmp_path, keep=100)
    store.load()
    for number in range(1, 5):
        store.record(incident(number, **_xid(number, "0000:41:00.0")))
    for number in range(5, 17):
        store.record(incident(number, flight=replace(_flight(1_700_000_000.0 + number), driver="550.90", cards=CARDS)))
    store.flush()
    store.close()
    kinds = json.loads(ctl("--state-dir", tmp_path, "incidents", "--patterns", "--json").out)["patterns"]
    (lost,) = [kind for kind in kinds if kind["cause"] == "gpu_off_bus"]
    shared = {(one["feature"], one["value"]): one for one in lost["shared"]}
    assert shared["card", "= 0000:41:00.0 RTX 3090"]["crashes_with"] == 4
    assert shared["driver", "= 560.35"]["crashes_with"] == 4
    said = ctl("--state-dir", tmp_path, "incidents", "--patterns").out
    assert "4 of 4 crashes had card = 0000:41:00.0 RTX 3090, against 16 of 64 healthy ones" in said


def test_no_incidents_have_no_patterns(ctl, applianced) -> None:
    """A sentence, or an empty list."""
    applianced.answers["incidents"] = {"incidents": []}
    assert ctl("--run-dir", applianced.run_dir, "incidents", "--patterns").out == "no incidents: nothing has crashed here\n"
    assert json.loads(ctl("--run-dir", applianced.run_dir, "incidents", "--patterns", "--json").out) == {"patterns": []}
