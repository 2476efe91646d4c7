"""A real child process that speaks the engine's HTTP and fails on command. Standard library only.

    python tests/fakes/engine.py --socket PATH [--ready-after-s S] [--step-s S] [--fail-start TEXT] [--fail-starts N] ...

Token n of an answer is " t<n>", so a test knows every byte to expect. `POST /fault` breaks it:
    {"kind": "signal", "signal": "SIGSEGV"}   dies by it (SIGSTOP: stops)
    {"kind": "exit", "code": 0}               leaves politely
    {"kind": "log", "text": "..."}            prints a line and lives on
    {"kind": "stall"}                         answers /health, produces no token any more
    {"kind": "hang"}                          blocks its loop: nothing is answered, SIGTERM neither
    {"kind": "deaf"}                          closes its socket and stays alive
    {"kind": "eat"}                           takes memory until somebody ends it, or it gets no more
    {"kind": "write", "path": "..."}          writes there; on a frozen disk that is for ever, in the kernel
    {"kind": "flood", "lines": 50000}         prints so many lines at once
    {"kind": "dump"}                          leaves what CUDA and torch would, where its environment says; then "exit"
    {"kind": "refuse"}                        answers /health and gives 500 to every prompt
    {"kind": "script", "steps": [...]}        several of these in turn; {"kind": "wait", "s": 65} among them
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import json
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

Json = dict[str, Any]


class FakeEngine:
    """Counters, slots and the faults."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.ready = self.draining = self.refusing = False
        self.progress = self.running = self.waiting = self.served = self.aborted = 0
        self.flowing = asyncio.Event()
        self.flowing.set()
        self.slots = asyncio.Semaphore(options.max_running)
        self.server: asyncio.Server | None = None
        self.stray_pid = 0
        if options.spawn_stray:
            stray = [sys.executable, "-c", "import time; time.sleep(600)"]
            self.stray_pid = subprocess.Popen(stray, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one keep-alive connection."""
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                length = next((int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("content-length:")), 0)
                body = await reader.readexactly(length)
                await self.route(head.split()[1], json.loads(body) if body else {}, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def route(self, path: str, body: Json, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request."""
        if path == "/health":
            counters = {"progress": self.progress, "running": self.running, "waiting": self.waiting, "limits": self.limits()}
            counters["kv_blocks_used"] = 3 * self.running
            status = "draining" if self.draining else "ok" if self.ready else "loading"
            answer(writer, 200 if status == "ok" else 503, {"status": status, **(counters if self.ready else {})})
        elif path == "/stats":
            counts = {"served": self.served, "aborted": self.aborted, "running": self.running}
            answer(writer, 200, {**counts, "pid": os.getpid(), "stray_pid": self.stray_pid})
        elif path == "/v1/models":
            answer(writer, 200, {"object": "list", "data": [{"id": self.options.name, "object": "model"}]})
        elif path == "/fault":
            answer(writer, 200, {"ok": True})
            await writer.drain()
            for step in body["steps"] if body["kind"] == "script" else [body]:
                await asyncio.sleep(step.get("s", 0))
                self.break_by(step)
        elif self.refusing:
            answer(writer, 500, {"error": {"message": "CUDA error", "type": "server_error", "param": None, "code": None}})
        elif path in ("/generate", "/v1/completions", "/v1/chat/completions"):
            await self.answer_tokens(path, body, reader, writer)
        else:
            answer(writer, 404, {"error": {"message": f"no route {path}", "type": "invalid_request_error", "param": None, "code": None}})
        await writer.drain()

    def limits(self) -> Json:
        """EngineLimits."""
        return {
            "model_id": self.options.name,
            "context_length_tokens": self.options.context_length,
            "max_running": self.options.max_running,
            "kv_tokens": 4 * self.options.context_length,
        }

    async def answer_tokens(self, path: str, body: Json, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A completion, streamed or whole; the client's end of file aborts it."""
        count = int(body.get("max_tokens") or body.get("sampling_params", {}).get("max_new_tokens") or 16)
        producing = asyncio.ensure_future(self.produce(path, body, count, writer))
        gone = asyncio.ensure_future(reader.read(1))
        await asyncio.wait({producing, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)  # a reset is another way to go; nobody is to complain of it in the log
        if not producing.done():
            producing.cancel()
            self.aborted += 1
            raise ConnectionResetError
        producing.result()
        self.served += 1

    async def produce(self, path: str, body: Json, count: int, writer: asyncio.StreamWriter) -> None:
        """Pace the tokens through a slot."""
        self.waiting += 1
        try:
            await self.slots.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        try:
            if body.get("stream"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            for n in range(count):
                await asyncio.sleep(self.options.step_s)
                await self.flowing.wait()
                self.progress += 1
                if body.get("stream"):
                    event = f"data: {json.dumps(chunk(path, f' t{n}', 'length' if n == count - 1 else None))}\n\n"
                    writer.write(framed(event))
                    await writer.drain()
            if body.get("stream"):
                writer.write(framed("data: [DONE]\n\n") + b"0\r\n\r\n")
            else:
                answer(writer, 200, whole(path, "".join(f" t{n}" for n in range(count)), count))
        finally:
            self.running -= 1
            self.slots.release()

    def break_by(self, fault: Json) -> None:
        """Do what the fault says."""
        kind = fault["kind"]
        if kind == "signal":
            os.kill(os.getpid(), signal.Signals[fault["signal"]])
        elif kind == "exit":
            os._exit(int(fault["code"]))
        elif kind == "log":
            print(fault["text"], file=sys.stderr, flush=True)
        elif kind == "stall":
            self.flowing.clear()
        elif kind == "eat":
            eat()
        elif kind == "dump":
            dump()
        elif kind == "write":
            Path(fault["path"]).write_bytes(b"x" * 4096)
        elif kind == "flood":
            print("\n".join(f"flood {n} of a log that says nothing" for n in range(int(fault["lines"]))), file=sys.stderr, flush=True)
        elif kind == "refuse":
            self.refusing = True
        elif kind == "hang":
            time.sleep(3600)
        elif kind == "deaf" and self.server is not None:
            self.server.close()


def dump() -> None:
    """A core dump of a faulting kernel, and one rank's last collectives."""
    if "CUDA_COREDUMP_FILE" in os.environ:
        Path(os.environ["CUDA_COREDUMP_FILE"].replace("%p", str(os.getpid()))).write_bytes(b"\x7fELF" + bytes(5000))
        frames = [{"name": "all_reduce", "filename": "/engine/parallel_state.py", "line": 412}]
        common = {"profiling_name": "nccl:all_reduce", "input_sizes": [[1, 4096]], "frames": frames}
        entries = [{**common, "collective_seq_id": 811, "state": "completed"}, {**common, "collective_seq_id": 812, "state": "started"}]
        Path(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + "0").write_bytes(pickle.dumps({"version": "2.9", "entries": entries}))


def eat() -> None:
    """10 MiB at a time, every page touched."""
    taken = []
    try:
        while True:
            taken.append(bytearray(os.urandom(1)) * (10 * 2**20))
            time.sleep(0.01)
    except MemoryError:
        taken.clear()
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def framed(text: str) -> bytes:
    """One HTTP chunk."""
    data = text.encode()
    return b"%x\r\n%s\r\n" % (len(data), data)


def answer(writer: asyncio.StreamWriter, status: int, body: Json) -> None:
    """A whole JSON answer."""
    data = json.dumps(body).encode()
    writer.write(f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)


def chunk(path: str, text: str, finish: str | None) -> Json:
    """One streamed event."""
    if path.endswith("chat/completions"):
        return {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]}
    return {"object": "text_completion", "choices": [{"index": 0, "text": text, "finish_reason": finish}]}


def whole(path: str, text: str, count: int) -> Json:
    """One answer in full."""
    usage = {"prompt_tokens": 1, "completion_tokens": count, "total_tokens": count + 1}
    if path == "/generate":
        return {
            "text": text,
            "output_ids": list(range(count)),
            "meta_info": {"completion_tokens": count, "finish_reason": {"type": "length"}},
        }
    if path.endswith("chat/completions"):
        message = {"role": "assistant", "content": text}
        return {"object": "chat.completion", "choices": [{"index": 0, "message": message, "finish_reason": "length"}], "usage": usage}
    return {"object": "text_completion", "choices": [{"index": 0, "text": text, "finish_reason": "length"}], "usage": usage}


def count_start(folder: str) -> int:
    """Which start this is, counted in a file: 1 for the first."""
    if not folder:
        return 1
    file = Path(folder) / "starts"
    number = int(file.read_text() or 0) + 1 if file.exists() else 1
    file.write_text(str(number))
    return number


async def load(options: argparse.Namespace) -> None:
    """Take --ready-after-s for it, in one of the ways in which engines take their time."""
    end_s = time.monotonic() + options.ready_after_s
    taken: list[bytes] = []
    while options.load == "stall" or time.monotonic() < end_s:
        if options.load == "read":
            Path(sys.executable).resolve().read_bytes()
        elif options.load == "grow":
            taken.append(b"x" * 2**20)
        elif options.load == "talk":
            print("fake engine: still at it", file=sys.stderr, flush=True)
        elif options.load == "compute":
            spin_s = time.monotonic() + 0.05
            while time.monotonic() < spin_s:
                pass
        await asyncio.sleep(0.05)


async def serve(options: argparse.Namespace) -> None:
    """Listen, load, answer until SIGTERM."""
    if options.fail_start and count_start(options.count_in) <= options.fail_starts:
        print(options.fail_start, file=sys.stderr, flush=True)
        raise SystemExit(options.exit_code)
    engine = FakeEngine(options)
    stopping = asyncio.Event()
    if options.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    if options.socket:
        engine.server = await asyncio.start_unix_server(engine.converse, options.socket)
    else:
        engine.server = await asyncio.start_server(engine.converse, "127.0.0.1", options.port)
    print("fake engine: loading", file=sys.stderr, flush=True)
    await load(options)
    engine.ready = True
    print("fake engine: ready", file=sys.stderr, flush=True)
    await stopping.wait()
    print("fake engine: Received SIGTERM, shutting down", file=sys.stderr, flush=True)
    engine.draining = True
    while engine.running:
        await asyncio.sleep(0.01)


def options_of(arguments: list[str]) -> argparse.Namespace:
    """The flags; unknown ones are ignored, so it can stand behind any engine's command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", default="")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--name", default="fake")
    parser.add_argument("--context-length", type=int, default=1024)
    parser.add_argument("--max-running", type=int, default=8)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--ready-after-s", type=float, default=0.0)
    parser.add_argument(
        "--load", default="wait", choices=["wait", "stall", "read", "grow", "talk", "compute"], help="what it does meanwhile"
    )
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument("--spawn-stray", action="store_true", help="start a child in a session of its own, as launchers do")
    parser.add_argument("--fail-start", default="", help="print this and leave with --exit-code instead of starting")
    parser.add_argument("--exit-code", type=int, default=1)
    parser.add_argument("--fail-starts", type=int, default=10**6, help="only so many starts fail, counted in --count-in")
    parser.add_argument("--count-in", default="", help="a folder")
    return parser.parse_known_args(arguments)[0]


if __name__ == "__main__":
    faulthandler.enable()
    asyncio.run(serve(options_of(sys.argv[1:])))
