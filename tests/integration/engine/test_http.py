"""The engine's process with the demo model: the openai client as it is, real text, real signals, real departures."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

pytestmark = pytest.mark.model

ROOT = Path(__file__).parents[3]
NAME = "demo"
CAPITAL = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
LIST = [{"role": "user", "content": "List the numbers from one to thirty in words, one per line. Begin with: one"}]
SMALL = ("--context-length", "1024", "--kv-pool-bytes", str(128 * 1024**2), "--prefill-chunk", "64", "--max-running", "4")


class Engine:
    """`python -m appliance.engine` on a free port."""

    def __init__(self, model: Path, log: Path, *arguments: str) -> None:
        self.log = log
        self.started_s = time.monotonic()
        command = [sys.executable, "-m", "appliance.engine", "--model", str(model), "--name", NAME, "--port", "0", *SMALL, *arguments]
        with log.open("w") as stderr:
            self.process = subprocess.Popen(command, cwd=ROOT, stderr=stderr)
        self.until(lambda: "Listening on" in self.log.read_text(), "listening")
        self.listening_after_s = time.monotonic() - self.started_s
        found = re.search(r"Listening on http://127\.0\.0\.1:(\d+)\.", self.log.read_text())
        assert found is not None
        self.port = int(found[1])

    def until(self, condition: Callable[[], bool], what: str, within_s: float = 60) -> None:
        deadline_s = time.monotonic() + within_s
        while not condition():
            assert self.process.poll() is None, f"ended with {self.process.returncode}: {self.log.read_text()}"
            assert time.monotonic() < deadline_s, f"not {what} within {within_s} s: {self.log.read_text()}"
            time.sleep(0.01)

    def until_ready(self) -> None:
        self.until(lambda: self.health()["status"] == "ok", "ready")

    def get(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def post(self, path: str, body: object) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request("POST", path, json.dumps(body))
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def health(self) -> Any:
        return json.loads(self.get("/health")[1])

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=120)

    def begin(self, path: str, body: object) -> socket.socket:
        """A request whose answer is not read."""
        raw = json.dumps(body).encode()
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        sock.sendall(b"POST %b HTTP/1.1\r\nhost: e\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (path.encode(), len(raw), raw))
        return sock

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def engine(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    one = Engine(demo_model, tmp_path_factory.mktemp("engine") / "log")
    try:
        one.until_ready()
        yield one
    finally:
        one.kill()


def test_openai_client_chat_whole_and_streamed_agree(engine: Engine) -> None:
    """A real question gets the right answer; the stream's pieces join to the same text; the usage agrees."""
    arguments: dict[str, Any] = {"model": NAME, "messages": CAPITAL, "temperature": 0, "max_tokens": 40}
    whole = engine.client.chat.completions.create(**arguments)
    assert whole.choices[0].message.content is not None
    assert "Paris" in whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(engine.client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole.choices[0].message.content
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )
    assert len(chunks) > 5


def test_openai_client_completions_whole_and_streamed_agree(engine: Engine) -> None:
    """The same for plain completions, cut by max_tokens."""
    arguments: dict[str, Any] = {"model": NAME, "prompt": "One, two, three, four,", "temperature": 0, "max_tokens": 12}
    whole = engine.client.completions.create(**arguments)
    assert "five" in whole.choices[0].text
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    chunks = list(engine.client.completions.create(**arguments, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text


def test_prompts_equal_transformers(engine: Engine, demo_model: Path) -> None:
    """The real tokenizer and template: token for token what transformers makes of text and of conversations."""
    from transformers import AutoTokenizer

    oracle = AutoTokenizer.from_pretrained(str(demo_model))
    texts = ["Hello", " leading", "1234567", "naïve 🙂👩‍👩‍👧‍👦 いろは\u0301", "a\n\n\tb", "<|im_start|>x", "x" * 300]
    for text in texts:
        assert engine.post("/tokenize", {"prompt": text})[1]["tokens"] == oracle(text)["input_ids"]
        conversations = [
            [{"role": "user", "content": text}],
            [{"role": "system", "content": text}, {"role": "user", "content": "x"}],
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": text}, {"role": "user", "content": " y "}],
        ]
        for messages in conversations:
            expected = oracle.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
            assert engine.post("/tokenize", {"messages": messages})[1]["tokens"] == expected


def test_streamed_text_is_the_tokens_text(engine: Engine, demo_model: Path) -> None:
    """At a high temperature the model says strange bytes: the text is still exactly what the tokenizer makes of the tokens."""
    from transformers import AutoTokenizer

    oracle = AutoTokenizer.from_pretrained(str(demo_model))
    bodies = [
        {"text": "🙂 いろは", "sampling_params": {"max_new_tokens": 40, "temperature": 2.0, "seed": seed, "ignore_eos": True}}
        for seed in (1, 2, 3, 1)
    ]
    with ThreadPoolExecutor(4) as pool:
        answers = [answer for _, answer in pool.map(lambda body: engine.post("/generate", body), bodies)]
    for answer in answers:
        assert answer["meta_info"]["completion_tokens"] == len(answer["output_ids"]) == 40
        assert answer["text"] == oracle.decode(answer["output_ids"], skip_special_tokens=True)
    assert answers[0]["output_ids"] == answers[3]["output_ids"] != answers[1]["output_ids"]


def test_stop_string_in_real_text(engine: Engine) -> None:
    """Cut before the stop string, and the engine computes nothing beyond it: it is idle at once."""
    arguments: dict[str, Any] = {"model": NAME, "messages": CAPITAL, "temperature": 0, "max_tokens": 900}
    answer = engine.client.chat.completions.create(**arguments, stop=["aris"]).choices[0]
    assert (answer.message.content or "").endswith("P")
    assert answer.finish_reason == "stop"
    engine.until(lambda: engine.health()["running"] == 0, "idle", within_s=2)


def test_eight_clients_at_once_get_what_one_alone_gets(engine: Engine) -> None:
    """More clients than slots: all are served, and each answer is the one that it gets alone."""
    prompts = [f"The number after {number} is" for number in range(8)]

    def complete(prompt: str) -> str:
        return engine.client.completions.create(model=NAME, prompt=prompt, temperature=0, max_tokens=16).choices[0].text

    alone = [complete(prompt) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(complete, prompts)) == alone


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_frees_the_slot(engine: Engine, stream: bool) -> None:
    """A client that closes its socket in mid-answer: the sequence is dropped within a step or two."""
    sock = engine.begin("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True, "stream": stream})
    engine.until(lambda: engine.health()["running"] == 1, "running")
    if stream:
        sock.recv(1)
    sock.close()
    engine.until(lambda: engine.health()["running"] == 0, "idle", within_s=3)


def test_too_long_prompts_name_both_numbers(engine: Engine) -> None:
    """Longer than the context: 422 with the count and the limit; ten megabytes are refused in a second, and decode does not wait."""
    status, answer = engine.post("/v1/completions", {"prompt": "word " * 1200})
    assert status == 422
    assert re.search(
        r"has 120[01] tokens and exceeds the context of 1024 tokens: at most 1023 prompt tokens fit", answer["error"]["message"]
    )
    started_s = time.monotonic()
    status, answer = engine.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 2_000_000}]})
    assert (status, answer["error"]["code"]) == (422, "context_length_exceeded")
    assert time.monotonic() - started_s < 5


def test_health_answers_while_the_engine_is_busy(engine: Engine) -> None:
    """Prefill and decode hold neither the event loop nor, for long, the interpreter: probes are answered, progress grows."""
    sock = engine.begin("/v1/chat/completions", {"messages": LIST, "max_tokens": 100, "temperature": 0, "ignore_eos": True})
    engine.until(lambda: engine.health()["running"] == 1, "running")
    waits_s, progress = [], [engine.health()["progress"]]
    while engine.health()["running"] == 1:
        started_s = time.monotonic()
        progress.append(engine.health()["progress"])
        waits_s.append(time.monotonic() - started_s)
    assert sorted(waits_s)[len(waits_s) // 2] < 0.25
    assert progress == sorted(progress)
    assert progress[-1] - progress[0] > 50
    sock.close()


def test_life_of_a_process(demo_model: Path, tmp_path: Path) -> None:
    """503 while it loads, milestones in order, SIGTERM in mid-stream: the stream ends properly, then the process, with 0."""
    engine = Engine(demo_model, tmp_path / "log")
    try:
        assert engine.get("/health")[0] in (200, 503)
        engine.until_ready()
        stream = engine.client.chat.completions.create(
            model=NAME, messages=LIST, temperature=0, max_tokens=60, stream=True, extra_body={"ignore_eos": True}
        )
        first = next(iter(stream))
        engine.process.send_signal(signal.SIGTERM)
        rest = list(stream)
        assert rest[-1].choices[0].finish_reason == "length"
        assert first.choices[0].delta.role == "assistant"
        assert engine.process.wait(20) == 0
    finally:
        engine.kill()
    log = engine.log.read_text()
    milestones = (
        "Listening on",
        "Load weight begin.",
        "Load weight end.",
        "KV cache is allocated.",
        "The engine is ready.",
        "Decode batch.",
    )
    places = [log.index(words) for words in (*milestones, "The engine has stopped.")]
    assert places == sorted(places)


def test_impossible_settings_are_said_and_coded(demo_model: Path, tmp_path: Path) -> None:
    """A context that the model does not have: the sentence with both numbers, exit code 78."""
    command = [
        sys.executable,
        "-m",
        "appliance.engine",
        "--model",
        str(demo_model),
        "--socket",
        str(tmp_path / "s"),
        "--context-length",
        "999999",
    ]
    result = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert result.returncode == 78
    assert re.search(r"ERROR BudgetError: a context length of 999999 tokens exceeds the model's own limit of \d+", result.stderr)
    assert "Traceback" not in result.stderr


def test_a_schema_is_followed_whatever_the_model_would_rather_say(engine: Engine) -> None:
    """Valid JSON of the schema, hot or greedy, whole or streamed, two at once; the model alone chooses within it."""
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "population": {"type": "integer", "minimum": 1, "maximum": 99999999},
            "kind": {"enum": ["capital", "village"]},
        },
        "required": ["city", "population", "kind"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}
    arguments: dict[str, Any] = {"model": NAME, "messages": CAPITAL, "response_format": form, "max_tokens": 80}
    for more in ({"temperature": 0}, {"temperature": 1.5, "seed": 3, "n": 2}):
        answer = engine.client.chat.completions.create(**arguments, **more)
        for choice in answer.choices:
            city = json.loads(choice.message.content or "")
            assert set(city) == {"city", "population", "kind"}
            assert 1 <= city["population"] <= 99999999
            assert city["kind"] in ("capital", "village")
            assert choice.finish_reason == "stop"
    chunks = list(engine.client.chat.completions.create(**arguments, temperature=0, stream=True))
    assert json.loads("".join(chunk.choices[0].delta.content or "" for chunk in chunks))["kind"] in ("capital", "village")
    free = engine.client.chat.completions.create(model=NAME, messages=CAPITAL, temperature=0, response_format={"type": "json_object"})
    assert isinstance(json.loads(free.choices[0].message.content or ""), dict)
    status, answer = engine.post(
        "/generate", {"text": "My number is", "sampling_params": {"regex": " [0-9]{3}-[0-9]{4}", "max_new_tokens": 20}}
    )
    assert (status, bool(re.fullmatch(r" [0-9]{3}-[0-9]{4}", answer["text"]))) == (200, True)


def test_the_second_turn_finds_the_first_one_cached(engine: Engine) -> None:
    """Its usage says how much; the answer is the same to the letter as a first time."""
    messages = [*LIST]
    first = engine.client.chat.completions.create(model=NAME, messages=messages, temperature=0, max_tokens=60)
    assert first.usage is not None
    messages += [{"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "And now in French."}]
    turns = [engine.client.chat.completions.create(model=NAME, messages=messages, temperature=0, max_tokens=20) for _ in range(2)]
    cached = [turn.usage.prompt_tokens_details.cached_tokens or 0 for turn in turns if turn.usage and turn.usage.prompt_tokens_details]
    assert cached[0] >= first.usage.prompt_tokens // 16 * 16
    assert cached[1] > cached[0]
    assert turns[0].choices[0].message.content == turns[1].choices[0].message.content
    page = engine.get("/metrics")[1].decode()
    assert re.search(r"^appliance_engine_cached_tokens_total [1-9]", page, re.MULTILINE)


def test_log_probabilities_of_a_greedy_answer_are_the_largest(engine: Engine) -> None:
    """Each token is the likeliest of its list, and no list is out of order."""
    answer = engine.client.chat.completions.create(
        model=NAME, messages=CAPITAL, temperature=0, max_tokens=12, logprobs=True, top_logprobs=4
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    for entry in logprobs.content:
        assert entry.token == entry.top_logprobs[0].token
        values = [other.logprob for other in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert values[0] == entry.logprob <= 0
    assert "".join(entry.token for entry in logprobs.content) == answer.choices[0].message.content


def test_a_harness_reads_how_likely_a_continuation_is(engine: Engine, demo_model: Path) -> None:
    """As lm-eval does: context and continuation as token ids, an echo and one token; alone or in a list, as transformers says."""
    import torch

    from appliance.engine.text import ModelText
    from tests.engine.oracle import Oracle

    text, oracle = ModelText(demo_model), Oracle(demo_model)
    texts = ("The capital of France is Paris, and that of Japan is Tokyo.", "Water boils at 100 degrees, e\u0301 and 🙂 aside.")
    prompts = [list(text.encode(one, add_special_tokens=False, most_tokens=100)) for one in texts]
    asked: Any = {"model": NAME, "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0, "seed": 1234}
    together = engine.client.completions.create(prompt=prompts, **asked).choices
    for choice, ids, said in zip(together, prompts, texts, strict=True):
        alone = engine.client.completions.create(prompt=ids, **asked).choices[0]
        assert choice.text.startswith(said)
        assert choice.logprobs == alone.logprobs
        assert alone.logprobs is not None
        numbers, tops = alone.logprobs.token_logprobs or [], alone.logprobs.top_logprobs or []
        logs = torch.log_softmax(oracle.logits(ids).double(), -1)
        expected = [float(logs[place, ids[place + 1]]) for place in range(len(ids) - 1)]
        assert numbers[1:-1] == pytest.approx(expected, abs=1e-3)
        greedy = [max(top, key=lambda name: top[name]) for top in tops[1:-1]]
        assert greedy == [_named(text, int(logs[place].argmax())) for place in range(len(ids) - 1)]


def _named(text: Any, token_id: int) -> str:
    name, raw = text.token(token_id)
    return name if raw.decode("utf-8", "ignore").encode() == raw else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def test_a_damaged_block_table_is_a_pause_for_its_client(demo_model: Path, engine: Engine, tmp_path: Path) -> None:
    """In the middle of an answer the engine's books are damaged: the client gets the very text of a sound engine, to the end, the
    log and /health say what was refused, and the engine goes on."""
    question: dict[str, Any] = {"model": NAME, "messages": LIST, "temperature": 0, "max_tokens": 40}
    sound = engine.client.chat.completions.create(**question)
    damaged = Engine(demo_model, tmp_path / "log", "--fault", "freed@6")
    try:
        damaged.until_ready()
        chunks = list(damaged.client.chat.completions.create(**question, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == sound.choices[0].message.content
        assert damaged.health()["block_violations"] == 2  # the write, and the read of the same block
        assert "reason=not_open" in damaged.log.read_text()
        again = damaged.client.chat.completions.create(**question)
        assert again.choices[0].message.content == sound.choices[0].message.content
        damaged.until(lambda: damaged.health()["kv_blocks_used"] == 0, "the blocks are given back")
    finally:
        damaged.kill()
