"""Two appliances behind a real sglang-router: `python tests/integration/several_boxes.py [--requests 60] [--router-python PATH]`.

Both on loopback, with SGLang's double as their engine. Streams through the router while nothing happens, while an engine is killed, while a
box is drained and comes back, and while a whole box dies. Prints what came of each; exit code 1 where a stream was lost that should not be.
The router is fetched with pip unless an interpreter that has it is named.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script from anywhere

from appliance.backends.loopback import free_port
from tests.integration.conftest import Foreground, wait_until
from tests.integration.engines import double

ROUTER = "sglang-router==0.3.2"
CACHE = Path(__file__).parents[2] / ".cache" / "routers"
LOOK_S = 1
"""How often the router asks /health of each box, as docs/several-boxes.md has it."""
CLIENTS = 6
PATIENCE_S = 60.0


class Box:
    """One appliance."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        engine = double("sglang", "0.5.17", folder / "engine")
        self.run = Foreground(folder / "s", *engine.arguments)
        self.model, self.url = self.run.wait_until_serving()

    def answered(self) -> int:
        """Chats so far."""
        _, page = ask(self.url, "/metrics")
        return int(sum(map(float, re.findall(r"^appliance_requests_total\{[^}]*chat/completions[^}]*\} (\S+)", page, re.MULTILINE))))


def ask(url: str, path: str, body: object = None) -> tuple[int, str]:
    """A whole answer; 0 where there is none."""
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=PATIENCE_S)
    try:
        data = json.dumps(body) if body is not None else None
        connection.request("POST" if data else "GET", path, data, {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    except (OSError, http.client.HTTPException) as error:
        return 0, str(error)
    finally:
        connection.close()


def chat(url: str, model: str, number: int) -> str:
    """What came of a streamed chat, in a word or a status."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"Number {number}."}],
        "max_tokens": 24,
        "stream": True,
        "temperature": 0,
    }
    status, text = ask(url, "/v1/chat/completions", body)
    if status != 200:
        return f"{status}" if status else "hung up"
    return "whole" if text.rstrip().endswith("data: [DONE]") and '"error"' not in text else "cut"


def load(url: str, model: str, count: int, midway: Callable[[], None] = lambda: None) -> Counter[str]:
    """So many chats by six clients; `midway` happens when a third of them have ended."""
    done, third = Counter[str](), threading.Event()

    def one(number: int) -> None:
        word = chat(url, model, number)
        done[word] += 1
        if done.total() >= count // 3:
            third.set()

    with ThreadPoolExecutor(CLIENTS) as pool:
        futures = [pool.submit(one, number) for number in range(count)]
        assert third.wait(PATIENCE_S)
        midway()
        for future in futures:
            future.result()
    return done


def start_router(python: str, boxes: list[Box]) -> tuple[subprocess.Popen[bytes], str]:
    """The router, when it serves both."""
    port = free_port()
    command = [
        python,
        "-m",
        "sglang_router.launch_router",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--prometheus-port",
        str(free_port()),
    ]
    command += ["--worker-urls", *(box.url for box in boxes), "--policy", "cache_aware", "--log-level", "warn"]
    # Without these, prompts that begin alike (as chats with one system prompt do) all go to one box until it has 64 more than the other.
    command += ["--balance-abs-threshold", "2", "--balance-rel-threshold", "1.1"]
    command += ["--health-check-interval-secs", str(LOOK_S), "--health-failure-threshold", "1", "--health-success-threshold", "1"]
    router = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    wait_until(lambda: ask(url, "/v1/models")[0] == 200, "the router serves", 60)
    return router, url


def python_with_router() -> str:
    """Of an environment that is made once."""
    python = CACHE / ROUTER.replace("==", "-") / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(python.parents[1])], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", ROUTER], check=True)
    return str(python)


def say(what: str, done: Counter[str], boxes: list[Box], before: list[int]) -> None:
    """A line."""
    shares = [box.answered() - count if box.run.process.poll() is None else 0 for box, count in zip(boxes, before, strict=True)]
    print(f"{what}: {dict(done)}; of the boxes: {shares}", flush=True)


def tried(folder: Path, python: str, requests: int) -> list[str]:
    """Everything that went wrong."""
    wrong: list[str] = []
    boxes = [Box(folder / name) for name in ("a", "b")]
    router, url = start_router(python, boxes)
    model = boxes[0].model

    def phase(what: str, allowed: set[str], midway: Callable[[], None] = lambda: None) -> None:
        before = [box.answered() for box in boxes]
        done = load(url, model, requests, midway)
        say(what, done, boxes, before)
        wrong.extend(f"{what}: {count} {word}" for word, count in done.items() if word not in allowed)

    try:
        phase("undisturbed", {"whole"})
        phase("kill -9 of an engine", {"whole"}, lambda: os.kill(boxes[0].run.engine_pid, signal.SIGKILL))
        wait_until(lambda: boxes[0].run.status()["state"] in ("serving", "degraded"), "the box serves again", PATIENCE_S)
        phase("drain of a box", {"whole"}, lambda: boxes[0].run.ctl("drain"))
        assert ask(boxes[0].url, "/health")[0] == 503
        boxes[0].run.ctl("resume")
        began_s, before = time.monotonic(), boxes[0].answered()

        def is_asked_again() -> bool:
            load(url, model, 2 * CLIENTS)
            return boxes[0].answered() > before

        wait_until(is_asked_again, "it is asked again", PATIENCE_S)
        print(f"resume: asked again after {time.monotonic() - began_s:.1f} s", flush=True)
        phase("kill -9 of a whole box", {"whole", "cut", "hung up", "500", "502", "503"}, lambda: kill_all(boxes[1]))
        phase("one box left", {"whole"})
    finally:
        router.terminate()
        router.wait(20)
        for box in boxes:
            kill_all(box)
    return wrong


def kill_all(box: Box) -> None:
    """Gateway, applianced and engine at once, as a power cut would."""
    for pid in box.run.descendants():
        os.kill(pid, signal.SIGKILL)
    if box.run.process.poll() is None:
        box.run.process.kill()
        box.run.process.wait(30)


def main() -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=60, help="In each phase.")
    parser.add_argument("--router-python", default="", help="An interpreter with sglang-router.")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="boxes-") as folder:
        wrong = tried(Path(folder), asked.router_python or python_with_router(), asked.requests)
    for line in wrong:
        print(f"WRONG: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
