"""What both fronts share: HTTP/1.1 by hand, the scheduler's pipe, streams that end when their client does."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

Json = dict[str, Any]
LOAD_S = float(os.environ.get("DOUBLE_LOAD_S", "0.2"))


def say(text: str) -> None:
    """A line of the log, on stderr as the real ones."""
    print(text, file=sys.stderr, flush=True)


class Gone(Exception):
    """The scheduler died with this request."""


def option(arguments: list[str], *names: str, default: str) -> str:
    """The value after the last of these options; argparse takes the last."""
    found = [arguments[place + 1] for place, word in enumerate(arguments) if word in names]
    return found[-1] if found else default


def stamp() -> str:
    """As in SGLang's log."""
    return time.strftime("[%Y-%m-%d %H:%M:%S]")


class Front:
    """Owns the scheduler process, the requests that wait for its tokens, and the listening socket."""

    chunk = running = context = 0
    aborts_on_disconnect = True

    def __init__(self, version: str, arguments: list[str]) -> None:
        self.version, self.arguments = version, arguments
        self.requests: dict[str, asyncio.Queue[Json | None]] = {}
        self.made = self.aborted = self.number = self.prompted = 0
        self.snapshot = Path(tempfile.mkdtemp(prefix="double-")) / "loads.json"
        self.child: asyncio.subprocess.Process | None = None
        self.ready, self.stopping, self.ended = False, asyncio.Event(), 0

    async def start_scheduler(self, kv_tokens: int) -> None:
        """The second process."""
        words = [str(self.chunk), str(self.running), str(kv_tokens), str(self.snapshot)]
        dialect = type(self).__name__.lower()
        self.child = await asyncio.create_subprocess_exec(
            sys.executable, str(Path(__file__).parent), dialect, self.version, "--scheduler", *words,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert self.child.stdout is not None
        await self.child.stdout.readline()
        asyncio.get_running_loop().create_task(self.read_tokens())

    async def read_tokens(self) -> None:
        """Until the scheduler is gone."""
        assert self.child is not None and self.child.stdout is not None
        while line := await self.child.stdout.readline():
            token = json.loads(line)
            self.made += 1
            if token["rid"] in self.requests:
                self.requests[token["rid"]].put_nowait(token)
        await self.child.wait()
        await self.scheduler_died(self.child.returncode or 0)

    async def scheduler_died(self, code: int) -> None:
        """What the front does about it."""
        raise NotImplementedError

    def order(self, **words: Any) -> None:
        """To the scheduler."""
        assert self.child is not None and self.child.stdin is not None
        self.child.stdin.write(json.dumps(words).encode() + b"\n")

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One keep-alive connection."""
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                length = next((int(line.split(":")[1]) for line in head.lower().split("\r\n") if line.startswith("content-length:")), 0)
                body = json.loads(await reader.readexactly(length)) if length else {}
                await self.route(head.split()[1].partition("?")[0], body, reader, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            writer.close()

    async def route(self, path: str, body: Json, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request."""
        if path == "/fault":
            answer(writer, 200, {})
            await writer.drain()
            if body["kind"] == "die":
                os._exit(9)
            self.order(fault=body["kind"])
        elif path == "/double":
            answer(writer, 200, {"aborted": self.aborted, "made": self.made, "open": len(self.requests)})
        elif path in ("/v1/chat/completions", "/v1/completions", "/generate"):
            await self.generate(path, body, reader, writer)
        elif path == "/v1/models":
            answer(writer, 200, {"object": "list", "data": [{"id": self.name, "object": "model", "max_model_len": self.context}]})
        elif not self.say_how(path, writer):
            answer(writer, 404, {"detail": "Not Found"})

    @property
    def name(self) -> str:
        """The id."""
        return option(self.arguments, "--served-model-name", default="model")

    def say_how(self, path: str, writer: asyncio.StreamWriter) -> bool:
        """Probes, limits, metrics; whether there is such a path."""
        raise NotImplementedError

    async def generate(self, path: str, body: Json, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """An answer, whole or streamed. The client's end of file cancels it."""
        prompt, begin = prompt_of(body)
        if prompt >= self.context:
            text = f"The input ({prompt} tokens) is longer than the model's context length ({self.context} tokens)."
            answer(writer, 400, {"error": {"message": text, "type": "BadRequestError", "code": 400}})
            return
        self.number += 1
        rid, queue = f"r{self.number}", asyncio.Queue[Json | None]()
        self.requests[rid] = queue
        self.prompted += prompt
        sampling = body.get("sampling_params", {})
        most = int(body.get("max_completion_tokens") or body.get("max_tokens") or sampling.get("max_new_tokens") or 16)
        self.order(rid=rid, prompt=prompt, begin=begin, most=most)
        telling = asyncio.ensure_future(self.tell(path, body, prompt, most, queue, writer))
        leaving = asyncio.ensure_future(reader.read(1))
        await asyncio.wait({telling, leaving}, return_when=asyncio.FIRST_COMPLETED)
        del self.requests[rid]
        if not telling.done():
            telling.cancel()
            self.aborted += 1
            if self.aborts_on_disconnect:
                self.order(abort=rid)
            raise ConnectionResetError
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        telling.result()

    async def tell(self, path: str, body: Json, prompt: int, most: int, queue: asyncio.Queue[Json | None], writer: Any) -> None:
        """Tokens as events, or all of them at once."""
        texts: list[str] = []
        streams = bool(body.get("stream"))
        while len(texts) < most:
            token = await queue.get()
            if token is None:
                self.tell_failure(writer, streams=streams, begun=bool(texts))
                raise Gone
            if streams and not texts:  # the first one is made before the head is sent: an error until then has a status of its own
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            texts.append(token["text"])
            if streams:
                writer.write(framed(event(path, self.name, texts, token["finish"], prompt)))
                await writer.drain()
        usage = {"prompt_tokens": prompt, "completion_tokens": len(texts), "total_tokens": prompt + len(texts)}
        if streams and (body.get("stream_options") or {}).get("include_usage"):
            last = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": self.name, "choices": [], "usage": usage}
            writer.write(framed(f"data: {json.dumps(last)}\n\n"))
        if streams:
            writer.write(framed("data: [DONE]\n\n") + b"0\r\n\r\n")
        else:
            answer(writer, 200, whole(path, self.name, texts, prompt))

    def tell_failure(self, writer: Any, *, streams: bool, begun: bool) -> None:
        """To one client, that the scheduler is gone."""
        raise NotImplementedError


def prompt_of(body: Json) -> tuple[int, int]:
    """How many tokens, and with which number the answer begins."""
    if "input_ids" in body:
        return len(body["input_ids"]), 0
    if isinstance(body.get("prompt"), list):
        return len(body["prompt"]), 0
    text = str(body.get("prompt") or body.get("text") or "")
    messages = body.get("messages") or []
    if body.get("continue_final_message") and messages and messages[-1]["role"] == "assistant":
        text = str(messages[-1]["content"])
    begun = re.findall(r" ?\bt(\d+)", text)
    words = sum(len(str(message.get("content", "")).split()) for message in messages) + len(text.split()) + 1
    return words, int(begun[-1]) + 1 if begun else 0


def framed(text: str) -> bytes:
    """One HTTP chunk."""
    data = text.encode()
    return b"%x\r\n%s\r\n" % (len(data), data)


def answer(writer: Any, status: int, body: Json | bytes) -> None:
    """A whole answer: JSON, or text as it is."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    kind = "text/plain" if isinstance(body, bytes) else "application/json"
    writer.write(f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)


def event(path: str, name: str, texts: list[str], finish: str | None, prompt: int) -> str:
    """One streamed event. SGLang's /generate says all so far (entrypoints/http_server.py), the OpenAI paths the new part."""
    if path == "/generate":
        about = {"finish_reason": {"type": finish} if finish else None, "prompt_tokens": prompt, "completion_tokens": len(texts)}
        return f"data: {json.dumps({'text': ''.join(texts), 'output_ids': list(range(len(texts))), 'meta_info': about})}\n\n"
    choice: Json = {"index": 0, "finish_reason": finish}
    chat = path.endswith("chat/completions")
    part = {"content": texts[-1], **({"role": "assistant"} if len(texts) == 1 else {})}
    choice |= {"delta": part} if chat else {"text": texts[-1]}
    kind = "chat.completion.chunk" if chat else "text_completion"
    return f"data: {json.dumps({'id': 'x', 'object': kind, 'created': 1, 'model': name, 'choices': [choice]})}\n\n"


def whole(path: str, name: str, texts: list[str], prompt: int) -> Json:
    """One answer in full."""
    text = "".join(texts)
    if path == "/generate":
        about = {"prompt_tokens": prompt, "completion_tokens": len(texts), "finish_reason": {"type": "length"}}
        return {"text": text, "output_ids": list(range(len(texts))), "meta_info": about}
    usage = {"prompt_tokens": prompt, "completion_tokens": len(texts), "total_tokens": prompt + len(texts)}
    chat = path.endswith("chat/completions")
    body: Json = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    kind = "chat.completion" if chat else "text_completion"
    choices = [{"index": 0, **body, "finish_reason": "length"}]
    return {"id": "x", "object": kind, "created": 1, "model": name, "choices": choices, "usage": usage}


def exposition(prefix: str, labels: str, series: tuple[tuple[str, str, float], ...]) -> bytes:
    """Prometheus' text, as the real ones write it: every number a float."""
    lines = [
        f"# HELP {prefix}{name} x\n# TYPE {prefix}{name} {kind}\n{prefix}{name}{labels} {float(value)}\n" for kind, name, value in series
    ]
    return "".join(lines).encode()
