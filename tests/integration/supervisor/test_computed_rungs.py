"""From a failure to the next command line: SGLang's double on a made-up card, with a model folder that can be planned with."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from appliance import diagnosis
from appliance.config.schema import BudgetTable, Config, DiagnosisTable, EngineTable, LadderTable, ModelTable, SupervisorTable
from appliance.gpu.nvml import NvmlReader
from appliance.supervisor import events as ev
from appliance.supervisor.box import Box
from appliance.supervisor.daemon import Supervisor
from appliance.supervisor.incidents import IncidentStore
from appliance.supervisor.notify import NullNotifier
from appliance.supervisor.run_dir import RunDir
from appliance.supervisor.views import Views
from tests.fakes.cards import HAS_COMPILER, FakeNvml, make_box
from tests.integration.engines import DOUBLES
from tests.integration.supervisor.test_cards import eventually
from tests.unit.planner import shapes

pytestmark = [pytest.mark.skipif(not HAS_COMPILER, reason="no gcc to build a libnvidia-ml with"), pytest.mark.timeout(120)]


def model_folder(folder: Path) -> Path:
    """The article's model, as far as a plan and a start look at it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shapes.hybrid_27b()))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"")
    return folder


def interpreter(folder: Path, version: str = "0.5.17") -> Path:
    """Of an environment that has the double in SGLang's place."""
    (folder / "lib/python3.11/site-packages" / f"sglang-{version}.dist-info").mkdir(parents=True)
    python = folder / "bin/python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {DOUBLES} sglang {version} "$@"\n')
    python.chmod(0o755)
    return python


class SglangBox:
    """The machine and the configuration around one supervisor after another."""

    def __init__(self, folder: Path, mem_fraction: float, context: int, *variables: str, cards: int = 1) -> None:
        self.folder, self.runs = folder, 0
        self.roots, self.nvml = make_box(folder / "box", cards), FakeNvml(folder / "nvml", cards)
        engine = EngineTable(
            backend="sglang", python=str(interpreter(folder / "env")),
            environment=("DOUBLE_TERM_POLL_S=0.2", "DOUBLE_LOAD_S=0.1", *variables),
            context_length_tokens=context, kv_dtype="fp8_e4m3", max_running=3, state_slots=9, tensor_parallel=cards,
        )  # fmt: skip
        self.config = replace(
            Config(), engine=engine, model=ModelTable(path=str(model_folder(folder / "model"))), ladder=replace(LadderTable(), prove="off"),
            budget=replace(BudgetTable(), mem_fraction=mem_fraction), diagnosis=DiagnosisTable(kernel_log=""),
            supervisor=SupervisorTable(backoff_first_s=0.1, probe_interval_s=0.1, stop_deadline_s=5.0),
        )  # fmt: skip

    @asynccontextmanager
    async def supervising(self) -> AsyncIterator[Supervisor]:
        """One applianced, in this process; the state folder is the same for all."""
        self.runs += 1
        run_dir, store = RunDir(self.folder / f"run-{self.runs}"), IncidentStore(self.folder, 100)
        run_dir.take()
        reader = NvmlReader(self.nvml.command, deadline_s=2.0)
        supervisor = Supervisor(
            self.config, run_dir, store, NullNotifier(), Box.of(self.config, store, roots=self.roots, nvml=reader),
            diagnose=diagnosis.diagnose, is_fatal_line=diagnosis.is_fatal_line,
        )  # fmt: skip
        running = asyncio.create_task(supervisor.run())
        try:
            yield supervisor
        finally:
            supervisor.post(ev.StopRequested("the test is over", immediately=True))
            await asyncio.wait_for(running, 20)
            store.close()


async def served(supervisor: Supervisor, generation: int) -> dict[str, str]:
    """The options of the engine that serves as this generation, out of its own command line."""
    await eventually(lambda: supervisor.state.generation == generation and supervisor.state.answering, f"generation {generation} serves")
    assert supervisor.life is not None
    words = Path(f"/proc/{supervisor.life.pid}/cmdline").read_bytes().decode().split("\0")
    return {word: value for word, value in itertools.pairwise(words) if word.startswith("--")}


def ask(supervisor: Supervisor, tokens: int) -> None:
    """A prompt of so many tokens, to the engine itself; what it dies of is the test's business."""
    assert supervisor.life is not None
    connection = http.client.HTTPConnection("127.0.0.1", supervisor.life.spec.endpoint.port or 0, timeout=10)
    body = {"input_ids": list(range(tokens)), "sampling_params": {"max_new_tokens": 1}}
    with suppress(OSError, http.client.HTTPException):
        connection.request("POST", "/generate", json.dumps(body))
        connection.getresponse().read()


async def test_a_prompt_that_runs_out_of_memory_brings_the_planned_flags(tmp_path: Path) -> None:
    """0.95 and a chunk of 2,048 die under a long prompt: half the chunk; that dies too: 0.93 and the context that fits, which serves it.
    The rungs that were taken outlive applianced."""
    box = SglangBox(tmp_path, 0.95, 119_808, "DOUBLE_OOM_ABOVE_POOL=110000")
    async with box.supervising() as supervisor:
        first = await served(supervisor, 1)
        assert (first["--mem-fraction-static"], first["--chunked-prefill-size"], first["--context-length"]) == ("0.95", "2048", "119808")
        await asyncio.to_thread(ask, supervisor, 3000)
        second = await served(supervisor, 2)
        assert (second["--mem-fraction-static"], second["--chunked-prefill-size"], second["--context-length"]) == ("0.95", "1024", "119808")
        await asyncio.to_thread(ask, supervisor, 3000)
        third = await served(supervisor, 3)
        assert (third["--mem-fraction-static"], third["--chunked-prefill-size"]) == ("0.93", "1024")
        assert 100_000 <= int(third["--context-length"]) < 105_256
        await asyncio.to_thread(ask, supervisor, 3000)
        assert supervisor.state.generation == 3
        view = await Views(supervisor).ladder({})
        assert [rung["index"] for rung in view["rungs"]] == list(range(len(view["rungs"])))
        assert (view["in_force"], [(one["cause"], one["rung"], one["times"]) for one in view["tried"]]) == (
            2,
            [("cuda_oom_prefill", 0, 1), ("cuda_oom_prefill", 1, 1)],
        )
        assert "cuda_oom" in str(supervisor.casework.last_incident)
        ladder = [rung.setting for rung in supervisor.state.ladder]
    async with box.supervising() as supervisor:
        again = await served(supervisor, 4)
        assert {name: again[name] for name in third if "port" not in name} == {name: third[name] for name in third if "port" not in name}
        assert [rung.setting for rung in supervisor.state.ladder] == ladder
        assert supervisor.state.rung.plan is not None


@pytest.mark.parametrize(
    ("orders", "direct"),
    [((), False), (("nvlinks 0",), False), (("nvlinks 4",), True), (("name NVIDIA A100-PCIE-40GB",), True)],
    ids=["two 3090s", "two 3090s without their bridge", "two 3090s with it", "two A100s"],
)
async def test_the_first_start_over_two_cards_is_safe_for_them(orders: tuple[str, ...], direct: bool, tmp_path: Path) -> None:
    """As NVML calls the cards: between consumer cards without a bridge neither P2P nor the engine's own all-reduce, from the start."""
    box = SglangBox(tmp_path, 0.9, 65_536, cards=2)
    box.nvml.order(*orders)
    async with box.supervising() as supervisor:
        options = await served(supervisor, 1)
        assert supervisor.life is not None
        variables = Path(f"/proc/{supervisor.life.pid}/environ").read_bytes().decode().split("\0")
        assert options["--tp-size"] == "2"
        assert ("--disable-custom-all-reduce" not in options, "NCCL_P2P_DISABLE=1" not in variables) == (direct, direct)
        assert ("--enable-p2p-check" in options) == direct
        assert any("P2P and the engine's own all-reduce are off" in note for note in supervisor.life.spec.notes) != direct
        gives_up = " ".join(rung.gives_up for rung in supervisor.state.ladder)
        assert direct or ("all-reduce" not in gives_up and "host memory" not in gives_up)


async def test_a_pool_that_is_too_small_at_the_start_raises_the_fraction(tmp_path: Path) -> None:
    """SGLang refuses 0.80: the next start asks for more static memory, not for less, and serves."""
    box = SglangBox(tmp_path, 0.80, 65_536, "DOUBLE_SMALL_BELOW=0.85")
    async with box.supervising() as supervisor:
        options = await served(supervisor, 2)
        incident = supervisor.casework.last_incident
        assert incident is not None
        assert (incident["diagnosis"]["cause"], incident["rung_after"]) == ("kv_pool_too_small", 1)
        assert 0.85 <= float(options["--mem-fraction-static"]) <= 0.95
        assert options["--context-length"] == "65536"
        assert "of headroom" in incident["action"]["basis"]
