"""applianced's control socket of a box with two cards, as a script says it: every state, a ladder, incidents, a flight recorder."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from appliance.core.launch import Endpoint
from appliance.core.publication import Publication
from appliance.core.states import EngineState
from appliance.core.units import GIB
from tests.fakes.scripted_appliance import ScriptedAppliance

Json = dict[str, Any]
CARDS = ("0000:01:00.0", "0000:02:00.0")
FREE = int(23.4 * GIB)


class ScriptedBox(ScriptedAppliance):
    """What the page asks for beyond publications. Tests change the attributes; the next second shows it."""

    def __init__(self, run_dir: Path, max_running: int = 8) -> None:
        super().__init__(run_dir, max_running)
        self.state = "serving"
        self.rung = 0
        self.why = "the setting that is configured"
        self.incidents: list[Json] = []
        self.tried: list[Json] = []
        self.flight_s = 900
        self.fused: list[Json] = []
        self.asked: list[tuple[str, Mapping[str, Any]]] = []
        answers = (self.status, self.ladder, self.timeline, self.flight, self.dossier, self.restart, self.drain, self.resume)
        self.verbs = {answer.__name__: answer for answer in answers}

    def say_serving(self, sentence: str) -> None:
        """The running engine, on a safer rung than the configured one, in these words."""
        endpoint = Endpoint(socket_path=str(self.run_dir / f"engine-{self.generation}.sock"))
        self.board.post(Publication(EngineState.DEGRADED, self.generation, endpoint, self.limits, sentence, None))

    async def status(self, _: Mapping[str, Any]) -> Json:
        """As applianced says it."""
        return {
            "state": self.state, "generation": self.generation, "sentence": "", "engine": "sglang", "engine_version": "0.5.17",
            "model": "Qwen3.6-27B-GPTQ-Int4", "rung": rungs()[self.rung], "rungs": 3, "restarts": len(self.incidents),
            "limits": {"kv_tokens": 109_000, "context_length_tokens": 102_400, "max_running": 8},
            "proof": {
                "proved": True, "detail": "proved: a prompt of 102,000 tokens took 1.31 GiB for a moment and left 0.62 GiB",
                "peak_bytes": int(1.31 * GIB), "left_bytes": int(0.62 * GIB), "time_s": 1.0,
            },
            "last_incident": self.incidents[0] if self.incidents else None, "uptime_s": 86_400.0, "state_for_s": 300.0, "sensors": {},
            "fused_lengths": self.fused,
        }  # fmt: skip

    async def ladder(self, _: Mapping[str, Any]) -> Json:
        """Three rungs."""
        measured = {
            "free_at_start_bytes": FREE, "weight_bytes": int(17.67 * GIB), "linear_state_bytes": int(0.73 * GIB),
            "fixed_bytes": int(0.35 * GIB), "activation_peak_bytes": int(1.31 * GIB), "kv_pool_bytes": int(3.32 * GIB),
            "non_torch_bytes": None, "source": "the start of 2026-11-30 06:00",
        }  # fmt: skip
        return {"rungs": rungs(), "in_force": self.rung, "why": self.why, "tried": self.tried, "measured": measured}

    async def timeline(self, _: Mapping[str, Any]) -> Json:
        """Newest first."""
        return {"incidents": self.incidents}

    async def flight(self, arguments: Mapping[str, Any]) -> Json:
        """A sample a second of the last quarter of an hour."""
        return flight_since(float(arguments["since_s"]), time.time(), self.flight_s)

    async def dossier(self, arguments: Mapping[str, Any]) -> Json:
        """One incident to take along."""
        return {"markdown": f"# {arguments['id']}\n\n**oom_activation** ...\n", "bundle": "KLUv/QQAAQAAmen0AA=="}

    async def restart(self, arguments: Mapping[str, Any]) -> Json:
        """Accepted."""
        self.asked.append(("restart", arguments))
        return {"state": "draining", "sentence": "draining: asked for"}

    async def drain(self, arguments: Mapping[str, Any]) -> Json:
        """Accepted."""
        self.asked.append(("drain", arguments))
        return {"state": "draining", "sentence": "draining: asked for"}

    async def resume(self, arguments: Mapping[str, Any]) -> Json:
        """Accepted."""
        self.asked.append(("resume", arguments))
        return {"state": "planning", "sentence": "planning"}


def rungs() -> list[Json]:
    """A 27B model on cards of 24 GB, and two safer settings."""
    return [_rung(0, 0.93, 102_400, 2048), _rung(1, 0.91, 86_016, 1024), _rung(2, 0.90, 65_536, 512)]


def _rung(index: int, fraction: float, context: int, chunk: int) -> Json:
    pool = int(FREE * fraction - 17.67 * GIB - 0.73 * GIB)
    headroom = int(FREE * (1 - fraction))
    return {
        "index": index, "mem_fraction": fraction, "context_length_tokens": context, "prefill_chunk_tokens": chunk, "max_running": 8,
        "kv_dtype": "fp8_e4m3", "tensor_parallel": 2, "block_tokens": 16,
        "gives_up": "" if index == 0 else f"prompts beyond {context} tokens, and {100 * index} ms of TTFT",
        "gains": "" if index == 0 else f"{index * 0.5:.1f} GiB of room for the peak of a prefill",
        "plan": {
            "free_at_start_bytes": FREE, "mem_fraction": fraction, "weight_bytes": int(17.67 * GIB), "linear_state_bytes": int(0.73 * GIB),
            "kv_pool_bytes": pool, "headroom_bytes": headroom, "activation_peak_bytes": int(1.2 * GIB * chunk / 2048),
            "context_length_tokens": context, "kv_bytes_per_token": 32_768, "kv_tokens": pool // 32_768, "terms": [],
        },
    }  # fmt: skip


def incident(number: int, time_s: float, recovered_s: float | None, *, before: int = 0, after: int = 0) -> Json:
    """A crash by a long prompt, with its chain and what was refuted."""
    line = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.94 GiB. GPU 0 has a total capacity of 23.56 GiB"
    root = {"source": "engine_log", "line": 4711, "text": line, "time_s": time_s}
    later = {"source": "exit", "line": 0, "text": "killed by SIGQUIT", "time_s": time_s + 0.4}
    return {
        "incident_id": f"inc-20261130-0600{number:02d}-ab{number:02d}", "time_s": time_s, "generation": number, "engine": "sglang",
        "engine_version": "0.5.17", "model": "Qwen3.6-27B-GPTQ-Int4", "phase": "serving", "uptime_s": 5400.0, "recovered_s": recovered_s,
        "rung_before": before, "rung_after": after, "requests": 3,
        "diagnosis": {
            "cause": "oom_activation", "confidence": "high", "root": root,
            "sentence": "The prefill of a long prompt asked for 1.94 GiB when 0.41 GiB were free.",
            "chain": [{"role": "root", "label": "oom", "citation": root}, {"role": "consequence", "label": "exit", "citation": later}],
            "refuted": [{"cause": "engine_watchdog", "reason": "it fired 0.4 s after the allocation had failed", "citation": None}],
            "remedies": ["Lower the memory fraction from 0.93 to 0.91", "Halve the prefill chunk"],
            "safer_config": [["mem_fraction", "0.93 -> 0.91"]], "numbers": [],
        },
        "action": {
            "kind": "restart_safer" if after > before else "restart_same",
            "basis": f"restarted on rung {after} because the prefill of a long prompt ran out of memory (evidence engine_log line 4711)",
        },
    }  # fmt: skip


def flight_since(since_s: float, now_s: float, kept_s: int = 900) -> Json:
    """Waves, so that a picture shows something."""
    times = [float(second) for second in range(math.floor(max(since_s, now_s - kept_s)) + 1, math.floor(now_s) + 1)]
    wave = [math.sin(time_s / 40) for time_s in times]
    samples = {
        "time_s": times, "running": [round(3 + 2 * each) for each in wave], "waiting": [0] * len(times),
        "kv_blocks_used": [round(3000 + 1800 * each) for each in wave], "vram_used_bytes": [0] * len(times),
    }  # fmt: skip
    cards = [
        {
            "address": address, "name": "NVIDIA GeForce RTX 3090", "total_bytes": int(23.56 * GIB), "time_s": times,
            "used_bytes": [int((22.4 + 0.4 * each) * GIB) for each in wave], "power_w": [250 + 60 * each + 10 * index for each in wave],
            "temperature_c": [round(66 + 4 * each) for each in wave], "pcie_generation": [4] * len(times),
            "pcie_width": [16 - 8 * index] * len(times), "pcie_replays": [0] * len(times),
        }
        for index, address in enumerate(CARDS)
    ]  # fmt: skip
    return {"samples": samples, "cards": cards if times else [], "block_tokens": 16}
