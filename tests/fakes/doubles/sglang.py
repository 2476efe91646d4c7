"""SGLang's front: `python -m sglang.launch_server`. Line numbers are those of sglang/srt/ in 0.5.17."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from typing import Any

from front import LOAD_S, Front, Json, answer, exposition, option, say, stamp
from scheduler import ILLEGAL, OOM

WATCHDOG = (0, 5, 10)
"""Before, nobody noticed a scheduler that died by a signal (sglang#18421): the front lives on, and its requests wait for ever."""
ZOMBIES = ((0, 5, 18), (0, 5, 19))
"""A client that leaves is forgotten before its request is aborted: it is decoded to its end (sglang#36333)."""
TERM_POLL_S = float(os.environ.get("DOUBLE_TERM_POLL_S", "5"))
"""managers/tokenizer_manager.py:3090: sigterm_watchdog looks every five seconds."""


class Sglang(Front):
    """See Front."""

    def __init__(self, version: str, arguments: list[str]) -> None:
        super().__init__(version, arguments)
        self.number_of_version = tuple(int(part) for part in version.split("."))
        self.chunk = int(option(arguments, "--chunked-prefill-size", default="2048"))
        self.running = int(option(arguments, "--max-running-requests", default="8"))
        self.context = int(option(arguments, "--context-length", default="4096"))
        self.fraction = float(option(arguments, "--mem-fraction-static", default="0.9"))
        self.kv_tokens = round(105_256 + (self.fraction - 0.93) * 761_300)
        self.aborts_on_disconnect = self.number_of_version not in ZOMBIES
        self.up = False

    async def serve(self) -> int:
        """The port opens when the model is loaded and the graphs are captured; /health says 503 until the warm-up has answered."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGQUIT, self.launch_phase_quit)
        say(f"{stamp()} server_args=ServerArgs(model_path='{option(self.arguments, '--model-path', default='')}', tp_size=1)")
        await self.load()
        loop.add_signal_handler(signal.SIGTERM, self.term)
        port = int(option(self.arguments, "--port", default="30000"))
        server = await asyncio.start_server(self.converse, "127.0.0.1", port)
        say(f"{stamp()} INFO:     Uvicorn running on http://127.0.0.1:{port} (Press CTRL+C to quit)")
        loop.remove_signal_handler(signal.SIGQUIT)
        loop.add_signal_handler(signal.SIGQUIT, self.running_phase_quit)
        await asyncio.sleep(0.1)
        self.up = True
        say(f"{stamp()} The server is fired up and ready to roll!")
        await self.stopping.wait()
        await self.drain()
        server.close()
        kill_tree(self)
        return 0

    async def load(self) -> None:
        """distributed/bootstrap.py:127, model_runner.py:1012, memory_pool.py:1670, cuda_graph_setup.py:430, scheduler.py:1069."""
        available = 23.23 * (1 - self.fraction)
        say(f"{stamp()} Init torch distributed ends. elapsed=0.52 s, mem usage=0.10 GB")
        say(f"{stamp()} Load weight begin. avail mem=23.23 GB")
        await asyncio.sleep(LOAD_S)
        say(f"{stamp()} Load weight end. elapsed={LOAD_S:.2f} s, type=Double, avail mem=5.56 GB, mem usage=17.67 GB.")
        too_small = self.fraction < float(os.environ.get("DOUBLE_SMALL_BELOW", "0"))
        failure = os.environ.get("DOUBLE_FAIL", "pool" if too_small else "")
        if failure:
            self.fail_start(failure)
            await asyncio.sleep(60)
        gib = self.kv_tokens * 32768 / 2**30 / 2
        sizes = f"K size: {gib:.2f} GB, V size: {gib:.2f} GB"
        say(f"{stamp()} KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: {self.kv_tokens}, {sizes}")
        say(f"{stamp()} Memory pool end. avail mem={available:.2f} GB")
        say(
            f"{stamp()} Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1, bs=[1, 2], avail mem={available:.2f} GB"
        )
        say(f"{stamp()} Capture target decode CUDA graph end. elapsed=3.10 s, mem usage=0.12 GB, avail mem={available - 0.5:.2f} GB.")
        say(
            f"{stamp()} max_total_num_tokens={self.kv_tokens}, chunked_prefill_size={self.chunk}, max_prefill_tokens=16384, "
            f"max_running_requests={self.running}, context_len={self.context}, available_gpu_mem={available - 0.5:.2f} GB"
        )
        await self.start_scheduler(self.kv_tokens)

    def fail_start(self, kind: str) -> None:
        """A scheduler that fails before it is ready says so, and sends SIGQUIT (scheduler.py:4951)."""
        errors = {"oom": f"torch.OutOfMemoryError: {OOM}", "illegal": f"torch.AcceleratorError: {ILLEGAL}"}
        small = (
            "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.70. Raise --mem-fraction-static "
            "above 0.762 (minimum viable = 1 - available/pre = 0.762)"
        )
        say(f"{stamp()} Scheduler hit an exception: Traceback (most recent call last):\n{errors.get(kind, small)}\n")
        os.kill(os.getpid(), signal.SIGQUIT)

    def launch_phase_quit(self) -> None:
        """entrypoints/engine.py:1651."""
        say(f"{stamp()} Received sigquit from a child process. It usually means the child failed.")
        kill_tree(self)

    def running_phase_quit(self) -> None:
        """SignalHandler.running_phase_sigquit_handler: it blocks the loop. Diagnostics are off only if both variables say so (:2990)."""
        say(f"{stamp()} SIGQUIT received. signum=None, frame=None. It usually means one child failed.")
        if [name for name in ("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH") if os.environ.get(name) != "0"]:
            say(f"{stamp()} Sleeping 5 seconds before crash diagnostics to let GPU activity settle.")
            time.sleep(5)
            say(f"{stamp()} Waiting 60.0 seconds for CUDA coredumps before exiting.")
            time.sleep(60)
        kill_tree(self)

    async def scheduler_died(self, code: int) -> None:
        """SubprocessWatchdog (utils/watchdog.py:217) looks once a second, and leaves exit code 0 alone; before it, nobody looked."""
        if code and self.number_of_version >= WATCHDOG and not self.stopping.is_set():
            await asyncio.sleep(1.0)
            pid = self.child.pid if self.child is not None else 0
            say(f"{stamp()} Subprocess scheduler_0 (pid={pid}) crashed with exit code {code}. Triggering SIGQUIT for cleanup...")
            os.kill(os.getpid(), signal.SIGQUIT)

    def term(self) -> None:
        """Drains without limit."""
        say(f"{stamp()} SIGTERM received. signum=15 frame=None. Draining requests and shutting down...")
        self.ended = 1
        self.stopping.set()

    async def drain(self) -> None:
        """sigterm_watchdog: looks for the signal and for an end every few seconds, and then kills itself."""
        await asyncio.sleep(TERM_POLL_S)
        while True:
            rids = list(self.requests)
            say(f"{stamp()} Gracefully exiting... Remaining number of requests {len(rids)}. Remaining requests remaining_rids={rids}.")
            if not rids:
                return
            await asyncio.sleep(TERM_POLL_S)

    def say_how(self, path: str, writer: Any) -> bool:
        """entrypoints/http_server.py:646, v1_loads.py, metrics of observability/metrics_collector.py."""
        if path in ("/health", "/health_generate"):
            writer.write(f"HTTP/1.1 {200 if self.up and not self.ended else 503} X\r\ncontent-length: 0\r\n\r\n".encode())
        elif path == "/v1/loads":
            load = json.loads(self.snapshot.read_text())
            answer(writer, 200, {"timestamp": time.strftime("%FT%TZ"), "version": self.version, "loads": [load]})
        elif path in ("/server_info", "/get_server_info"):
            answer(writer, 200, self.server_info())
        elif path == "/model_info":
            answer(writer, 200, {"model_path": "double", "is_generation": True})
        elif path == "/metrics" and "--enable-metrics" in self.arguments:
            answer(writer, 200, self.metrics())
        else:
            return False
        return True

    def server_info(self) -> Json:
        """Resolved options, the scheduler's own numbers, its state."""
        return {
            "served_model_name": self.name, "context_length": self.context, "chunked_prefill_size": self.chunk,
            "max_total_num_tokens": self.kv_tokens, "max_req_input_len": min(self.context, self.kv_tokens) - 6, "version": self.version,
            "internal_states": [{"effective_max_running_requests_per_dp": self.running}],
        }  # fmt: skip

    def metrics(self) -> bytes:
        """Some of the 135 series."""
        load = json.loads(self.snapshot.read_text())
        labels = f'{{model_name="{self.name}",engine_type="unified",tp_rank="0",pp_rank="0"}}'
        series = (
            ("gauge", "num_running_reqs", load["num_running_reqs"]),
            ("gauge", "num_queue_reqs", load["num_waiting_reqs"]),
            ("gauge", "token_usage", load["num_used_tokens"] / self.kv_tokens),
            ("counter", "prompt_tokens_total", self.prompted),
            ("counter", "generation_tokens_total", self.made),
        )
        return exposition("sglang:", labels, series)

    def tell_failure(self, writer: Any, *, streams: bool, begun: bool) -> None:
        """Never comes to it: who waits for a dead scheduler waits until the front is killed."""


def kill_tree(front: Front) -> None:
    """utils/common.py kill_process_tree: children first, then itself, all by SIGKILL; also at the end of a clean stop."""
    say(f"{stamp()} kill_process_tree called: parent_pid={os.getpid()}, include_parent=True, pid={os.getpid()}")
    if front.child is not None and front.child.returncode is None:
        front.child.kill()
    os.kill(os.getpid(), signal.SIGKILL)
