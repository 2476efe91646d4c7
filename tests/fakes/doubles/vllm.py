"""vLLM's front: `vllm serve`. Places are those of vllm/ in 0.32.0."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from typing import Any

from front import LOAD_S, Front, answer, exposition, framed, option, say
from scheduler import ILLEGAL, OOM

WATCH_S = float(os.environ.get("DOUBLE_WATCH_S", "5"))
"""entrypoints/launchers/launcher.py, watchdog_loop: looks every five seconds whether the engine is dead, and then ends the server."""
BLOCK_TOKENS = 16


class Vllm(Front):
    """See Front."""

    def __init__(self, version: str, arguments: list[str]) -> None:
        super().__init__(version, arguments)
        self.chunk = int(option(arguments, "--max-num-batched-tokens", default="2048"))
        self.running = int(option(arguments, "--max-num-seqs", default="8"))
        length = option(arguments, "--max-model-len", default="4096")
        self.context = 4096 if length == "auto" else int(length)
        self.fraction = float(option(arguments, "--gpu-memory-utilization", default="0.9"))
        self.dead = False

    def log(self, place: str, text: str, level: str = "INFO", process: str = "EngineCore") -> None:
        """As both processes write it."""
        pid = os.getpid() if process == "APIServer" or self.child is None else self.child.pid
        say(f"({process} pid={pid}) {level} {time.strftime('%m-%d %H:%M:%S')} [{place}] {text}")

    async def serve(self) -> int:
        """The socket is there from the start (it is bound before the engine is made); nobody answers on it before the model is loaded."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.stopping.set)
        self.log("utils.py:325", f"vLLM API server version {self.version}", process="APIServer")
        if not await self.load():
            return 1
        server = await asyncio.start_unix_server(self.converse, option(self.arguments, "--uds", default="/tmp/double.sock"))
        self.ready = True
        say(f"(APIServer pid={os.getpid()}) INFO:     Application startup complete.")
        await self.stopping.wait()
        if self.dead:
            say(f"(APIServer pid={os.getpid()}) INFO:     Shutting down")
        else:
            self.log("launcher.py:135", "[shutdown] API server: shutdown triggered", process="APIServer")
        server.close()
        if self.child is not None and self.child.returncode is None:
            self.child.kill()
        say(f"(APIServer pid={os.getpid()}) INFO:     Finished server process [{os.getpid()}]")
        return 0  # after a death of the engine too (vllm#48966)

    async def load(self) -> bool:
        """v1/worker/gpu_model_runner.py, gpu_worker.py, v1/core/kv_cache_utils.py."""
        self.log("core.py:93", f"Initializing a V1 LLM engine (v{self.version}) with config: model='double', max_seq_len={self.context}")
        await asyncio.sleep(LOAD_S)
        self.log("gpu_model_runner.py:3553", f"Model loading took 17.67 GiB memory and {LOAD_S:.2f} seconds")
        failure = os.environ.get("DOUBLE_FAIL", "")
        if failure:
            return self.fail_start(failure)
        tokens = self.kv_tokens
        self.log("gpu_worker.py:298", f"Available KV cache memory: {tokens * 65536 / 2**30:.2f} GiB")
        self.log("kv_cache_utils.py:1087", f"GPU KV cache size: {tokens:,} tokens")
        times = tokens / self.context
        self.log("kv_cache_utils.py:1091", f"Maximum concurrency for {self.context:,} tokens per request: {times:.2f}x")
        self.log("gpu_model_runner.py:4244", "Graph capturing finished in 3 secs, took 0.12 GiB")
        await self.start_scheduler(tokens)
        return True

    @property
    def kv_tokens(self) -> int:
        """A 3090's rest behind 17.67 GiB of weights."""
        return int(max(0.1, self.fraction * 23.5 - 18.8) * 2**30 / 65536) // BLOCK_TOKENS * BLOCK_TOKENS

    def fail_start(self, kind: str) -> bool:
        """core.py: the traceback, then the front's own: "Engine core initialization failed"."""
        errors = {"oom": f"torch.OutOfMemoryError: {OOM}", "illegal": f"torch.AcceleratorError: {ILLEGAL}"}
        small = (
            f"ValueError: To serve at least one request with the models's max seq len ({self.context}), (7.50 GiB KV cache is needed, "
            "which is larger than the available KV cache memory (2.55 GiB). Based on the available memory, the estimated maximum model "
            "length is 41776."
        )
        for line in ("EngineCore failed to start.", "Traceback (most recent call last):", errors.get(kind, small)):
            self.log("core.py:1101", line, "ERROR")
        failed = "Engine core initialization failed. See root cause above. Failed core proc(s): {}"
        say(f"(APIServer pid={os.getpid()}) RuntimeError: {failed}")
        return False

    async def scheduler_died(self, code: int) -> None:
        """v1/engine/async_llm.py: every request gets EngineDeadError; the first of them, or the watchdog, ends the server."""
        if self.stopping.is_set():
            return
        self.dead = True
        self.log("core_client.py:817", "[shutdown] MPClient: engine core exited unexpectedly; starting cleanup", "WARNING", "APIServer")
        self.log("async_llm.py:906", "AsyncLLM output_handler failed.", "ERROR", "APIServer")
        dead = "EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause."
        say(f"(APIServer pid={os.getpid()}) vllm.v1.engine.exceptions.{dead}")
        waiting = list(self.requests.values())
        for queue in waiting:
            queue.put_nowait(None)
        await asyncio.sleep(0.05 if waiting else WATCH_S)
        self.stopping.set()

    def tell_failure(self, writer: Any, *, streams: bool, begun: bool) -> None:
        """entrypoints/openai: a stream that has begun ends with an error event and [DONE], an answer with status 500."""
        text = "EngineCore encountered an issue. See stack trace (above) for the root cause."
        error = {"error": {"message": text, "type": "InternalServerError", "param": None, "code": 500}}
        if streams and begun:
            writer.write(framed(f"data: {json.dumps(error)}\n\n") + framed("data: [DONE]\n\n") + b"0\r\n\r\n")
        else:
            answer(writer, 500, error)

    def say_how(self, path: str, writer: Any) -> bool:
        """entrypoints/serve/instrumentator/health.py; v1/metrics/loggers.py."""
        if path == "/health":
            writer.write(f"HTTP/1.1 {503 if self.dead else 200} X\r\ncontent-length: 0\r\n\r\n".encode())
        elif path == "/metrics":
            answer(writer, 200, self.metrics())
        else:
            return False
        return True

    def metrics(self) -> bytes:
        """Some of them."""
        load = json.loads(self.snapshot.read_text())
        labels, blocks = f'{{engine="0",model_name="{self.name}"}}', self.kv_tokens // BLOCK_TOKENS
        series = (
            ("gauge", "num_requests_running", load["num_running_reqs"]),
            ("gauge", "num_requests_waiting", load["num_waiting_reqs"]),
            ("gauge", "kv_cache_usage_perc", load["num_used_tokens"] / self.kv_tokens),
            ("counter", "prompt_tokens_total", self.prompted),
            ("counter", "generation_tokens_total", self.made),
        )
        cache = f'{{block_size="{BLOCK_TOKENS}",cache_dtype="auto",engine="0",num_gpu_blocks="{blocks}"}}'
        return exposition("vllm:", labels, series) + exposition("vllm:", cache, (("gauge", "cache_config_info", 1.0),))
