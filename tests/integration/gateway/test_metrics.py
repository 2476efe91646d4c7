"""/metrics as Prometheus, Grafana and a person read it."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from appliance.core.launch import EngineLimits
from appliance.gateway.definitions import GATEWAY, REPLICA
from tests.fakes.model_folder import byte_level_folder
from tests.fakes.scripted_appliance import ROOT, GatewayProcess, ScriptedAppliance, appliance, eventually, gateway
from tests.integration.gateway.test_fuse import asked, is_healthy
from tests.integration.gateway.test_keys import bearer, keys_file

MONITORING = ROOT / "docs/monitoring"
PLAN = {"kv_pool_bytes": 1024, "weight_bytes": 2048, "kv_tokens": 7, "terms": []}
STATUS = {
    "rung": {"index": 1, "plan": PLAN},
    "rungs": 4,
    "restarts": 2,
    "last_incident": {"incident_id": "inc-2"},
    "xids": {"31": 2, "79": 1},
    "sensors": {"kernel_log": {"ok": True, "detail": "works"}, "gpu": {"ok": False, "detail": "no card"}},
}
CARD = {
    "address": "0000:01:00",
    "total_bytes": 2**34,
    "used_bytes": [1, 2**33],
    "power_w": [250.5],
    "temperature_c": [61],
    "pcie_replays": [3],
}
FLIGHT = {"samples": [], "cards": [CARD, {"address": "0000:02:00", "total_bytes": 2**34, "used_bytes": [], "power_w": [None]}]}
INCIDENTS = {"incidents": [{"diagnosis": {"cause": cause}} for cause in ("oom_prefill", "oom_prefill", "hang")]}
NAME = re.compile(r"`(appliance_[a-z_*]+)`")


async def scraped(running: GatewayProcess, **headers: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Series name → label values → value; and the page is Prometheus' own format."""
    answer = await running.ask("GET", "/metrics", **headers)
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(answer.body.decode()):
        assert family.documentation, family.name
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


@pytest.fixture
def page(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Everything at once: keys, traffic, a refusal, a crash, the engine's own numbers, applianced's."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield asyncio.run(full_page(run_dir))


async def full_page(run_dir: Path) -> str:
    path, secrets = keys_file(run_dir, alice="")
    key = bearer(secrets["alice"])
    folder = str(byte_level_folder(run_dir / "model"))
    scripted = ScriptedAppliance(run_dir)
    scripted.verbs = {"status": answering(STATUS), "incidents": answering(INCIDENTS), "flight": answering(FLIGHT)}
    scripted.limits = EngineLimits("tiny", 4096, 4, 4 * 4096)
    await scripted.listen()
    try:
        async with gateway(run_dir, f"gateway.api_keys_file={path}", "admission.max_prompt_tokens=2000") as running:
            await start(scripted, folder)
            assert (await asked(running, "hello " * 300, **key)).status == 200
            assert (await asked(running, "hello " * 4000, **key)).status == 422
            assert (await running.ask("GET", "/v1/nothing", authorization="Bearer wrong")).status == 401
            async with running.connection() as stranger:
                stranger.writer.write(b"\x16\x03\x01 no HTTP\r\n\r\n")
                assert (await stranger.answer()).status == 400
            held = asyncio.ensure_future(asked(running, "hello", max_tokens=2000, **key))
            due_s = time.monotonic() + 10
            while (await running.ask("GET", "/status", **key)).json()["slots"]["in_use"] != 1:
                assert time.monotonic() < due_s
            await scripted.crash()
            await start(scripted, folder)
            assert (await held).status == 200
            return (await running.ask("GET", "/metrics", **key)).body.decode()
    finally:
        await scripted.close()


def answering(document: Mapping[str, Any]) -> Any:
    """A verb that says this."""

    async def verb(_: Mapping[str, Any]) -> Mapping[str, Any]:
        return document

    return verb


async def start(scripted: ScriptedAppliance, folder: str) -> None:
    """The next engine life, published when it is ready."""
    path = await scripted.start_engine("--model", folder, "--step-s", "0.001", program="serve_scripted.py", publish=False)
    await eventually(lambda: is_healthy(path), "the model is loaded")
    scripted.serve()


def test_promtool_finds_nothing_to_say(page: str) -> None:
    """Debian's own: names, units, types and help as Prometheus wants them; and the alert rules are rules."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("NOT CHECKED: promtool is missing; apt-get install prometheus")
    checked = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, text=True, timeout=60)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
    rules = subprocess.run([promtool, "check", "rules", str(MONITORING / "alerts.yml")], capture_output=True, text=True, timeout=60)
    assert rules.returncode == 0, rules.stdout + rules.stderr


def test_every_number_is_documented_and_every_documented_number_is_there(page: str) -> None:
    """docs/metrics.md is the list."""
    documented = set(NAME.findall((ROOT / "docs/metrics.md").read_text()))
    served = {line.split()[2] for line in page.splitlines() if line.startswith("# HELP ")}
    assert {name for name in served - documented if not name.startswith("appliance_gateway_process_")} == set()
    assert {name for name in documented - served if "*" not in name} == set()
    assert any(name.startswith("appliance_gateway_process_") for name in served)


def documented_rows() -> Iterator[tuple[str, str, set[str]]]:
    """Name, type and labels of every number of docs/metrics.md. A row may have several names, of one type or of one each."""
    for line in (ROOT / "docs/metrics.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) < 4 or not cells[0].startswith("`appliance_") or "*" in cells[0]:
            continue
        names, kinds = NAME.findall(cells[0]), cells[1].split(", ")
        for name, kind in zip(names, kinds * len(names) if len(kinds) == 1 else kinds, strict=False):
            yield name, kind, set(re.findall(r"`(\w+)`", cells[2]))


def test_types_and_labels_are_those_of_the_documentation(page: str) -> None:
    """What a number counts and what it is told apart by: of every number, where it has a value."""
    types = {line.split()[2]: line.split()[3] for line in page.splitlines() if line.startswith("# TYPE ")}
    labels: dict[str, set[str]] = {}
    for line in page.splitlines():
        sample = re.match(r"(appliance_\w+)(?:\{(.*)\})? ", line)
        if sample is not None:
            name = sample[1] if sample[1] in types else re.sub(r"_(?:bucket|sum|count|created)$", "", sample[1])
            labels.setdefault(name, set()).update(set(re.findall(r'(\w+)="', sample[2] or "")) - {"le"})
    rows = list(documented_rows())
    assert len(rows) > 50
    assert {name: types.get(name) for name, kind, _ in rows if types.get(name) != kind} == {}
    assert {name: (labels[name], said) for name, _, said in rows if name in labels and labels[name] != said} == {}


def test_dashboard_and_alerts_ask_for_numbers_that_are_there(page: str) -> None:
    """A panel of a series that nobody serves shows nothing, for ever."""
    series = {re.split(r"[{ ]", line)[0] for line in page.splitlines() if line and not line.startswith("#")}
    series |= {name.removesuffix("_bucket") for name in series}
    dashboard = json.loads((MONITORING / "grafana.json").read_text())
    asked_for = set(re.findall(r"\bappliance_[a-z_]+", json.dumps(dashboard["panels"]) + (MONITORING / "alerts.yml").read_text()))
    assert len(dashboard["panels"]) > 20
    of_several = {metric.name for metric in GATEWAY.metrics if REPLICA in metric.labels}  # test_replicas.py has a page with these
    assert asked_for - of_several - series == set()


def test_the_values_are_what_happened(page: str) -> None:
    """One answer before the crash and one over it, a refusal for length, one for a key."""
    found = {
        (sample.name, *sample.labels.values()): sample.value for family in text_string_to_metric_families(page) for sample in family.samples
    }
    assert found["appliance_up",] == 1
    assert found["appliance_requests_total", "200", "/v1/chat/completions"] == 2
    assert found["appliance_refusals_total", "invalid_api_key"] == 1
    assert found["appliance_fuse_trips_total", "context_length_exceeded"] == 1
    assert found["appliance_requests_resent_total", "replayed"] == 1
    assert found["appliance_tokens_total", "in", "usage"] > 300
    assert 1 < found["appliance_tokens_total", "out", "usage"] <= 2001
    assert found["appliance_key_requests_total", "alice"] == 2
    assert found["appliance_key_tokens_total", "in", "alice"] == found["appliance_tokens_total", "in", "usage"]
    assert found["appliance_answer_tokens_count",] == 2
    assert found["appliance_engine_generation",] == 2
    assert found["appliance_engine_rung",] == 1
    assert found["appliance_engine_restarts_total",] == 2
    assert found["appliance_incidents", "oom_prefill"] == 2
    assert found["appliance_plan_bytes", "kv_pool"] == 1024
    assert (found["appliance_gpu_xids_total", "31"], found["appliance_gpu_xids_total", "79"]) == (2, 1)
    assert found["appliance_gpu_memory_used_bytes", "0000:01:00"] == 2**33
    assert found["appliance_gpu_memory_bytes", "0000:02:00"] == 2**34
    assert found["appliance_gpu_power_watts", "0000:01:00"] == 250.5
    assert ("appliance_gpu_power_watts", "0000:02:00") not in found
    assert found["appliance_sensor_up", "gpu"] == 0
    assert found["appliance_engine_metrics_up",] == 1
    assert found["appliance_engine_ready",] == 1
    assert found["appliance_engine_decode_launches_total",] > 0
    assert found["appliance_engine_kv_block_references_min",] == 0
    assert sum(value for key, value in found.items() if key[0] == "appliance_engine_kv_blocks_by_references") == 64
    assert found["appliance_kv_tokens_pool",] == 4 * 4096


async def test_a_stream_is_counted_by_its_usage_else_by_its_events(run_dir: Path) -> None:
    """And its tokens have gaps."""
    async with appliance(run_dir) as (running, _):
        body = {"do": "stream", "stream": True, "events": 20, "gap_s": 0.005, "role": True}
        assert (await running.post(body)).complete
        numbers = await scraped(running)
    # The role, twenty tokens and [DONE]; this engine sends no finish reason, so one token too few is assumed.
    assert 19 <= numbers["appliance_tokens_total"]["out", "estimate"] <= 21
    assert numbers["appliance_inter_token_latency_seconds_count"][()] >= 19
    assert 0.09 < numbers["appliance_inter_token_latency_seconds_sum"][()] < 5
    assert numbers["appliance_time_to_first_token_seconds_count"][()] == 1


async def test_a_hung_engine_and_no_applianced_do_not_hold_up_a_scrape(run_dir: Path) -> None:
    """What others do not say in time is missing, and nothing else."""
    async with appliance(run_dir) as (running, scripted):
        await scripted.hang_up()
        assert scripted.engine is not None
        scripted.engine.send_signal(signal.SIGSTOP)
        began = asyncio.get_running_loop().time()
        first, second = await asyncio.gather(scraped(running), scraped(running))
        took_s = asyncio.get_running_loop().time() - began
        scripted.engine.send_signal(signal.SIGCONT)
    assert took_s < 4
    for numbers in (first, second):
        assert numbers["appliance_engine_metrics_up"][()] == 0
        assert numbers["appliance_slots_capacity"][()] == 8
        assert "appliance_engine_rung" not in numbers


async def test_metrics_can_be_switched_off(run_dir: Path) -> None:
    """404 with the way back."""
    async with gateway(run_dir, "metrics.enabled=false") as running:
        answer = await running.ask("GET", "/metrics")
    assert (answer.status, answer.error()["code"]) == (404, "metrics_off")
