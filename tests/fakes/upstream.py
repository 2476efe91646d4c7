"""A real child process whose HTTP goes wrong in the ways the request asks for. Standard library only; fast enough to measure with.

    python tests/fakes/upstream.py --socket PATH | --port N [--health CODE] [--says WORD]

The body says how it is answered: {"do": KIND, ...}; or its last message does, for proxies that let no field through that
they do not know.
    whole      {"bytes": N, "status": S, "body": TEXT}   a JSON answer with its length, after {"delay_s"}
    stream     {"events": N, "gap_s": S, "bytes": B}     server-sent events and [DONE]; {"role": true}: a role event first
    die        after {"after_events": N} events (streams) or {"after_bytes": N} bytes of a whole answer: the process kills itself
    raw        {"text": T, "close": true}                exactly these bytes
    never                                                nothing
    words      {"events": N, "gap_s": S, "trailing": T}  as vLLM streams a chat, a completion or a message (SGLang: /generate): WORD0 WORD1
                                                         ..., up to `max_tokens`; goes on behind a text that has begun; spaces stand
                                                         before or behind words; dies behind {"die_after": "words" | "reason"}
GET /stats: {"requests", "aborted_at": [monotonic seconds], "open"}; /health: 200, or the code of --health.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import time
from typing import Any

Json = dict[str, Any]
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Stats:
    """What /stats tells."""

    def __init__(self, health: int, says: str) -> None:
        self.health = health
        self.says = says
        self.requests = self.open = 0
        self.aborted_at: list[float] = []


class Upstream(asyncio.Protocol):
    """One connection; requests come one after the other, each with a content-length or without a body."""

    def __init__(self, stats: Stats) -> None:
        self.stats = stats
        self.buffer = b""
        self.task: asyncio.Task[None] | None = None
        self.writable = asyncio.Event()
        self.writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self.task is not None and not self.task.done():
            self.stats.aborted_at.append(time.monotonic())
            self.task.cancel()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if self.buffer.startswith(b"PRI "):  # sglang-router asks so whether its worker speaks gRPC
            self.transport.close()
            return
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = self.buffer[:end].lower()
        length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
        if len(self.buffer) < end + 4 + length:
            return
        path = self.buffer[:end].split(b" ", 2)[1].decode()
        body, self.buffer = self.buffer[end + 4 : end + 4 + length], self.buffer[end + 4 + length :]
        self.stats.requests += 1
        if path == "/health":
            self.whole({"body": '{"status": "ok"}', "status": self.stats.health})
        elif path == "/stats":
            said = {"requests": self.stats.requests, "aborted_at": self.stats.aborted_at, "open": self.stats.open}
            self.whole({"body": json.dumps(said)})
        elif path.startswith("/appliance/"):
            self.whole({"body": "{}", "status": 404})
        else:
            asked = orders(json.loads(body)) if body else {}
            self.task = asyncio.get_running_loop().create_task(self.answer(asked, head))

    async def answer(self, asked: Json, head: bytes) -> None:
        self.stats.open += 1
        try:
            if asked.get("delay_s"):
                await asyncio.sleep(asked["delay_s"])
            kind = asked.get("do", "whole")
            if kind == "whole":
                self.whole({"body": head.decode("latin-1"), **asked} if asked.get("echo") else asked)
            elif kind == "raw":
                self.transport.write(asked["text"].encode("latin-1"))
                if asked.get("close"):
                    self.transport.close()
            elif kind == "never":
                await asyncio.sleep(3600)
            elif kind == "words":
                kinds = {b"/v1/messages": self.message, b"/generate": self.grown}
                await kinds.get(head.split(b" ", 2)[1], self.words)(asked)
            elif kind == "die" and "after_bytes" in asked:
                self.whole({**asked, "cut": asked["after_bytes"]})
                await asyncio.sleep(0.05)
                os.kill(os.getpid(), signal.SIGKILL)
            else:
                await self.stream(asked)
        finally:
            self.stats.open -= 1

    def whole(self, asked: Json) -> None:
        body = asked["body"].encode() if "body" in asked else json.dumps({"text": "x" * asked.get("bytes", 64)}).encode()
        kind = asked.get("type", "application/json")
        head = f"HTTP/1.1 {asked.get('status', 200)} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        self.transport.write(head + body[: asked.get("cut", len(body))])

    async def stream(self, asked: Json) -> None:
        self.transport.write(STREAM_HEAD)
        if asked.get("role"):
            self.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        count, gap_s, filler = asked.get("events", 8), asked.get("gap_s", 0), "x" * asked.get("bytes", 8)
        for number in range(count):
            if gap_s:
                await asyncio.sleep(gap_s)
            elif number % 64 == 63:
                await asyncio.sleep(0)
            await self.writable.wait()
            if asked["do"] == "die" and number == asked["after_events"]:
                await asyncio.sleep(0.05)
                os.kill(os.getpid(), signal.SIGKILL)
            self.event({"choices": [{"index": 0, "delta": {"content": f" {self.stats.says}{number} {filler}"}, "finish_reason": None}]})
        if asked.get("done", True):
            self.transport.write(b"e\r\ndata: [DONE]\n\n\r\n")
        self.transport.write(b"0\r\n\r\n")

    async def words(self, asked: Json) -> None:
        chat = "messages" in asked
        begun = asked["messages"][-1]["content"].strip() if asked.get("continue_final_message") else ""
        begun = begun if chat else asked["prompt"].partition(":")[2]
        known = begun.split()
        least = min(asked["events"], len(known) + asked.get("max_tokens", 1000))
        text = " ".join([*known, *(f"{self.stats.says}{number}" for number in range(len(known), least))])[len(begun) :]
        pieces = re.findall(r"\s*\S+\s" if asked.get("trailing") else r"\s*\S+", text + " " * bool(asked.get("trailing")))
        frame = {"id": f"{self.stats.says}-1", "object": "chunk", "created": 1, "model": "m"}
        self.transport.write(STREAM_HEAD)
        if chat:
            self.event({**frame, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        for piece in pieces:
            await asyncio.sleep(asked.get("gap_s", 0))
            part = {"delta": {"content": piece}} if chat else {"text": piece}
            self.event({**frame, "choices": [{"index": 0, **part, "logprobs": None, "finish_reason": None}]})
        await self.die_behind(asked, "words")
        reason = "stop" if least == asked["events"] else "length"
        self.event({**frame, "choices": [{"index": 0, **({"delta": {}} if chat else {"text": ""}), "finish_reason": reason}]})
        await self.die_behind(asked, "reason")
        usage = {"prompt_tokens": 10 + len(known), "completion_tokens": len(pieces), "total_tokens": 10 + len(known) + len(pieces)}
        self.event({**frame, "choices": [], "usage": usage})
        self.transport.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    async def message(self, asked: Json) -> None:
        self.transport.write(STREAM_HEAD)
        about = {"id": f"msg-{self.stats.says}", "type": "message", "role": "assistant", "content": [], "model": "m", "stop_reason": None}
        self.event({"type": "message_start", "message": {**about, "usage": {"input_tokens": 10, "output_tokens": 0}}}, named=True)
        self.event({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}, named=True)
        count = min(asked["events"], asked["max_tokens"])
        for number in range(count):
            await asyncio.sleep(asked.get("gap_s", 0))
            delta = {"type": "text_delta", "text": f"{' ' * bool(number)}{self.stats.says}{number}"}
            self.event({"type": "content_block_delta", "index": 0, "delta": delta}, named=True)
        await self.die_behind(asked, "words")
        self.event({"type": "content_block_stop", "index": 0}, named=True)
        reason = "end_turn" if count == asked["events"] else "max_tokens"
        delta = {"stop_reason": reason, "stop_sequence": None}
        self.event({"type": "message_delta", "delta": delta, "usage": {"input_tokens": 10, "output_tokens": count}}, named=True)
        await self.die_behind(asked, "reason")
        self.event({"type": "message_stop"}, named=True)
        self.transport.write(b"0\r\n\r\n")

    async def grown(self, asked: Json) -> None:
        known, most = len(asked["text"].partition(":")[2].split()), asked["sampling_params"]["max_new_tokens"]
        least, text, ids = min(asked["events"], known + most), "", list[int]()
        self.transport.write(STREAM_HEAD)
        for number in range(known, least):
            await asyncio.sleep(asked.get("gap_s", 0))
            text, ids = f"{text} {self.stats.says}{number}", [*ids, number]
            reason = None if number < least - 1 else {"type": "stop" if least == asked["events"] else "length"}
            about = {"id": self.stats.says, "finish_reason": reason, "prompt_tokens": 10 + known, "completion_tokens": len(ids)}
            self.event({"text": text, "output_ids": ids, "meta_info": about})
        self.transport.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    async def die_behind(self, asked: Json, place: str) -> None:
        if asked.get("die_after") == place and self.stats.says == "a":
            await asyncio.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)

    def event(self, document: Json, *, named: bool = False) -> None:
        name = f"event: {document['type']}\n".encode() if named else b""
        data = name + b"data: " + json.dumps(document).encode() + b"\n\n"
        self.transport.write(b"%x\r\n%s\r\n" % (len(data), data))


def orders(body: Json) -> Json:
    """What the request asks for, itself or in one of its messages; with what else it says."""
    messages = body.get("messages")
    said = [one.get("content") for one in messages] if "do" not in body and isinstance(messages, list) else []
    found = next((json.loads(text) for text in reversed(said) if isinstance(text, str) and text.startswith('{"do"')), {})
    return {**body, **found}


async def serve(options: argparse.Namespace) -> None:
    """Listen until killed."""
    stats = Stats(options.health, options.says)
    loop = asyncio.get_running_loop()
    if options.socket:
        await loop.create_unix_server(lambda: Upstream(stats), options.socket, backlog=1024)
    else:
        await loop.create_server(lambda: Upstream(stats), "127.0.0.1", options.port)
    print("listening", flush=True)
    await asyncio.sleep(86400)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", default="")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--health", type=int, default=200)
    parser.add_argument("--says", default="t")
    asyncio.run(serve(parser.parse_args()))
