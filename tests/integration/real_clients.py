"""Clients that people use, unmodified, in front of the built-in engine: undisturbed, and with the engine killed under them.

    python tests/integration/real_clients.py [--venv FOLDER] [--only NAME ...] [--model DIR]

Their packages are installed into a virtual environment of their own (--venv keeps it for the next time). Every answer to the
one question, however it was asked for, must be the text that a plain request gets; and the same again while engines die.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CLIENTS = Path(__file__).parent / "clients"
PACKAGES = ("openai", "litellm", "langchain-openai", "anthropic", "llm", "aiohttp")
PROMPT = "Tell me a story about a lighthouse."
MAX_TOKENS = 60
KILL_EVERY_S = 6.0
TIMEOUT_S = 240.0
Json = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Where things are."""

    url: str
    model: str
    programs: Path
    folder: Path


def plain(place: Place) -> str:
    """The text that a request without any client library gets."""
    messages = [{"role": "user", "content": PROMPT}]
    body = {"model": place.model, "messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0}
    request = urllib.request.Request(f"{place.url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def run(command: list[str], **environment: str) -> str:
    """Its output; raises with all of it when the program fails."""
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", **environment},
    )
    if ended.returncode:
        raise RuntimeError(f"{command[:2]} ended with {ended.returncode}:\n{ended.stdout[-1500:]}\n{ended.stderr[-3000:]}")
    return ended.stdout


def program(name: str) -> Callable[[Place], list[Json]]:
    """A program of tests/integration/clients: a JSON object an answer."""

    def ask(place: Place) -> list[Json]:
        said = run([str(place.programs / "python"), str(CLIENTS / name), place.url, place.model, PROMPT, str(MAX_TOKENS)])
        return [json.loads(line) for line in said.splitlines() if line.startswith('{"how"')]

    return ask


def llm(place: Place) -> list[Json]:
    """The llm command with an extra model in its settings."""
    home = place.folder / "llm"
    home.mkdir(exist_ok=True)
    settings = f"- model_id: here\n  model_name: {place.model}\n  api_base: {place.url}/v1\n  api_key_name: here\n"
    (home / "extra-openai-models.yaml").write_text(settings)
    (home / "keys.json").write_text('{"here": "none"}')
    command = [str(place.programs / "llm"), "-m", "here", PROMPT, "-o", "temperature", "0", "-o", "max_tokens", str(MAX_TOKENS)]
    found = []
    for more in ([], ["--no-stream"]):
        text = run([*command, *more], LLM_USER_PATH=str(home))
        found.append({"how": "stream" if not more else "whole", "text": text.removesuffix("\n")})
    return found


def curl(place: Place) -> list[Json]:
    """-N, HTTP/1.1 and 1.0, and the request's body from a file."""
    messages = [{"role": "user", "content": PROMPT}]
    body = {"model": place.model, "messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": True}
    file = place.folder / "body.json"
    file.write_text(json.dumps(body))
    found = []
    for version in ("--http1.1", "--http1.0"):
        command = ["curl", "-sS", "-N", "--fail-with-body", version, "-H", "content-type: application/json", "-d", f"@{file}"]
        said = run([*command, f"{place.url}/v1/chat/completions"])
        datas = [line[6:] for line in said.splitlines() if line.startswith("data: ")]
        if datas[-1] != "[DONE]":
            raise RuntimeError(f"no [DONE]: {said[-300:]}")
        deltas = [choice["delta"] for data in datas[:-1] for choice in json.loads(data)["choices"]]
        found.append({"how": version, "text": "".join(delta.get("content") or "" for delta in deltas)})
    return found


ALL: dict[str, Callable[[Place], list[Json]]] = {
    "curl": curl,
    "openai": program("with_openai.py"),
    "litellm": program("with_litellm.py"),
    "langchain": program("with_langchain.py"),
    "anthropic": program("with_anthropic.py"),
    "llm": llm,
    "benchmark": program("like_a_benchmark.py"),
}


def installed(venv: Path) -> Path:
    """The folder of the environment's programs; made on the first call."""
    if not (venv / ".installed").exists():
        print(f"installing {', '.join(PACKAGES)} into {venv}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        subprocess.run([str(venv / "bin/python"), "-m", "pip", "install", "-q", *PACKAGES], check=True)
        (venv / ".installed").touch()
    return venv / "bin"


def wrong_in(name: str, ask: Callable[[Place], list[Json]], place: Place, right: str) -> list[str]:
    """What is wrong with a client's answers."""
    try:
        answers = ask(place)
    except (RuntimeError, OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
        return [f"{name}: {error}"]
    stripped = right.strip()  # some clients strip what they print
    usages = {answer["usage"] for answer in answers if answer.get("usage") is not None}
    problems = [f"{name}, {one['how']}: {one['text']!r}\n  and not {right!r}" for one in answers if one["text"].strip() != stripped]
    problems += [f"{name}: no answer"] if not answers else []
    problems += [f"{name}: usages differ: {usages}"] if len(usages) > 1 else []
    return problems


def keep_killing(status: Callable[[], Json], stop: threading.Event, kills: list[int]) -> None:
    """An engine every few seconds, whenever one serves."""
    while not stop.wait(KILL_EVERY_S):
        with suppress(Exception):
            found = status()
            if found["state"] == "serving" and found["engine_pid"]:
                os.kill(found["engine_pid"], signal.SIGKILL)
                kills.append(found["generation"])


def main() -> int:
    """1 when a client tripped."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--venv", type=Path, help="where their packages are, or come to be [default: a folder that is removed]")
    parser.add_argument("--only", nargs="+", choices=sorted(ALL), default=sorted(ALL))
    parser.add_argument("--model", type=Path, default=ROOT / ".cache/models/SmolLM2-135M-Instruct")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing is left
    sys.path.insert(0, str(ROOT))
    from tests.integration.conftest import Foreground

    folder = Path(tempfile.mkdtemp(prefix="clients-"))
    programs = installed(options.venv or folder / "venv")
    arguments = [part for one in ("supervisor.stable_after_s=1", "supervisor.probe_interval_s=0.2") for part in ("--set", one)]
    appliance = Foreground(folder / "state", "--model", str(options.model), "--port", "0", *arguments)
    wrong: list[str] = []
    try:
        model, url = appliance.wait_until_serving()
        place = Place(url, model, programs, folder)
        right = plain(place)
        for disturbed in (False, True):
            stop, kills = threading.Event(), list[int]()
            killer = threading.Thread(target=keep_killing, args=(appliance.status, stop, kills), daemon=True)
            if disturbed:
                killer.start()
            for name in options.only:
                began_s = time.monotonic()
                problems = wrong_in(name, ALL[name], place, right)
                wrong += problems
                how = f"{'over kills, ' if disturbed else ''}{time.monotonic() - began_s:.1f} s"
                print(f"{name} ({how}): {len(problems)} problems", *problems, sep="\n", flush=True)
            stop.set()
            print(f"{len(kills)} engines killed", flush=True)
    finally:
        appliance.stop()
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
