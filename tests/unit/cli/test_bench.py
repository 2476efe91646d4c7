"""bench: requests of a shape, sent to something that answers, and what is said of them."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from appliance.cli.bench import shapes_of
from appliance.gateway.profile import Profiler
from appliance.traffic import bucket_of, read_profile


class Model(BaseHTTPRequestHandler):
    """Streams as many tokens as it is asked for; a token a word. Counts how many it serves at once."""

    protocol_version = "HTTP/1.1"
    lock = threading.Lock()
    asked: ClassVar[list[dict]] = []
    at_once = most_at_once = 0
    key = ""

    def log_message(self, *arguments: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self._whole(200, {"data": [{"id": "m"}]})

    def do_POST(self) -> None:
        cls = type(self)
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        cls.key = self.headers.get("authorization", "")
        words = len(body["prompt"].split())
        with cls.lock:
            cls.asked.append(body)
            cls.at_once += 1
            cls.most_at_once = max(cls.most_at_once, cls.at_once)
        if words > 1000:
            self._one_less()
            self._whole(422, {"error": {"message": f"the prompt has {words} tokens"}})
        else:
            self._stream(words, body["max_tokens"])

    def _one_less(self) -> None:
        """Before its client can know."""
        with self.lock:
            type(self).at_once -= 1

    def _stream(self, words: int, tokens: int) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        for _ in range(tokens):
            time.sleep(0.001)
            self.wfile.write(b'data: {"choices": [{"text": " x"}]}\n\n')
        self._one_less()
        usage = {"prompt_tokens": words, "completion_tokens": tokens, "prompt_tokens_details": {"cached_tokens": 1}}
        self.wfile.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())
        self.close_connection = True

    def _whole(self, status: int, document: dict) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def url() -> Iterator[str]:
    """Of a server that answers."""
    Model.asked, Model.most_at_once = [], 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_an_endpoint_with_keys_says_how_to_give_one(ctl, tmp_path: Path) -> None:
    """On this command line; how it is sent is our business."""

    class Closed(Model):
        def do_GET(self) -> None:
            self._whole(401, {"error": {"message": "this endpoint needs an API key; send it as `Authorization: Bearer KEY`"}})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Closed)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    said = ctl("bench", "--url", f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    server.server_close()
    assert (said.code, said.out) == (1, "")
    assert "needs an API key\n  name a file whose only line is one: --api-key-file FILE" in said.err


def test_it_sends_what_it_is_told_and_counts(ctl, url: str, tmp_path: Path) -> None:
    """So many requests of those lengths, so many at once, with the key; every figure as data."""
    key = tmp_path / "key"
    key.write_text("sk-1\n")
    said = ctl(
        *("bench", "--url", url, "--requests", "12", "--concurrency", "3", "--prompt-tokens", "40"),
        *("--answer-tokens", "7", "--api-key-file", key, "--json"),
    )
    found = json.loads(said.out)
    assert said.code == 0, said.err
    assert (found["model"], found["requests"], found["failed"], found["errors"]) == ("m", 12, 0, {})
    assert (found["prompt_tokens"], found["answer_tokens"], found["cached_tokens"]) == (480, 84, 12)
    assert found["time_to_first_token_s"]["p50"] > 0
    assert found["answer_tokens_per_s"] > 0
    assert 1 < Model.most_at_once <= 3
    assert Model.key == "Bearer sk-1"
    assert len({body["prompt"] for body in Model.asked[1:]}) == 12


def test_what_fails_is_said_and_is_the_exit_code(ctl, url: str) -> None:
    """With the server's own sentence."""
    said = ctl("bench", "--url", url, "--requests", "3", "--prompt-tokens", "2000", "--answer-tokens", "2")
    assert said.code == 1
    assert "3 failed" in said.out
    assert "3 times: 422 the prompt has 2000 tokens" in said.out


def test_nobody_there_and_no_traffic_are_told(ctl, tmp_path: Path) -> None:
    """In a sentence with what to do."""
    said = ctl("bench", "--url", "http://127.0.0.1:9")
    assert (said.code, "is it serving?" in said.err) == (1, True)
    said = ctl("--state-dir", tmp_path, "bench", "--from-traffic", "--url", "http://127.0.0.1:9")
    assert (said.code, "no traffic has been recorded" in said.err) == (1, True)
    said = ctl("bench", "--url", "ftp://x")
    assert (said.code, "http://127.0.0.1:8000" in said.err) == (1, True)


def recorded(state_dir: Path) -> None:
    """Short questions with short answers, and now and then a long one of which the half was cached."""
    profiler = Profiler(state_dir, 30, time.time)
    for number in range(40):
        profiler.arrived(float(number), number % 3)
        long = number % 4 == 0
        profiler.answered(300 if long else 12, 20 if long else 4, 150 if long else 0)
    profiler._write(profiler._taken())


def test_the_shapes_are_those_of_the_profile(tmp_path: Path) -> None:
    """Pairs of lengths stay pairs; concurrency and what was shared come from their own histograms."""
    recorded(tmp_path)
    shapes = shapes_of(read_profile(tmp_path), 2000, random.Random(3))
    pairs = Counter((bucket_of(shape.prompt_tokens), bucket_of(shape.answer_tokens)) for shape in shapes)
    assert len([pair for pair, count in pairs.items() if count > 100]) <= 4
    assert 0.15 < sum(shape.prompt_tokens > 100 for shape in shapes) / 2000 < 0.35
    assert all((shape.prompt_tokens > 100) == (shape.answer_tokens > 10) for shape in shapes)
    assert max(shape.beside for shape in shapes) == 2
    assert 0.15 < sum(shape.shared > 0.3 for shape in shapes) / 2000 < 0.35
    assert {round(shape.gap_s) for shape in shapes} == {1}


def test_traffic_is_replayed(ctl, url: str, tmp_path: Path) -> None:
    """The same seed, the same requests."""
    recorded(tmp_path)
    command = ("--state-dir", tmp_path, "bench", "--from-traffic", "--url", url, "--requests", "30", "--json", "--seed", "5")
    first, asked = json.loads(ctl(*command).out), sorted(body["prompt"] for body in Model.asked)
    Model.asked = []
    second = json.loads(ctl(*command).out)
    assert first["failed"] == 0
    assert first["requests"] == 30
    assert sorted(body["prompt"] for body in Model.asked) == asked
    assert (first["prompt_tokens"], first["answer_tokens"]) == (second["prompt_tokens"], second["answer_tokens"])
    assert Model.most_at_once <= 3
