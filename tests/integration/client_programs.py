"""What real_clients.py runs: clients by their own packages, the way their documentation has them used, and load generators.

A client is asked one question in several ways and gives an answer for each: `how`, `text`, and `own` where it wrapped the question in words
of its own. A load generator gives one: how many requests were answered and how many were not.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CLIENTS = Path(__file__).parent / "clients"
VLLM = str(Path(__file__).parents[2] / ".cache/vllm/runtimes/current-vllm/bin/python")
"""Where `make test-vllm` puts one."""
PROMPT = "Tell me a story about a lighthouse."
MAX_TOKENS = 40
REQUESTS = 24
AT_ONCE = 6
TIMEOUT_S = 420.0
Json = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Where things are.

    Attributes:
        url: of the gateway.
        model: its id.
        model_dir: its folder, for those who count tokens themselves.
        environments: folders of installed packages, by the client's word for its own.
        folder: for files of this run.
    """

    url: str
    model: str
    model_dir: Path
    environments: Path
    folder: Path

    def program(self, environment: str, name: str) -> str:
        """One of an environment's."""
        return str(self.environments / environment / "bin" / name)

    def body(self, **more: Any) -> Path:
        """The question as a request's body, in a file."""
        asked = {"model": self.model, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": MAX_TOKENS, "temperature": 0}
        file = self.folder / "body.json"
        file.write_text(json.dumps(asked | more))
        return file


Ask = Callable[[Place], list[Json]]


@dataclass(frozen=True)
class Client:
    """One of them.

    Attributes:
        environment: the folder that its packages come into; several share one. Empty: a program of the system's.
        packages: what is installed there, by pip, or by npm into "node".
        needs: a program that must be in PATH; without it the client is skipped.
    """

    ask: Ask
    environment: str = ""
    packages: tuple[str, ...] = ()
    needs: str = ""


def run(command: Sequence[str], folder: Path | None = None, **environment: str) -> str:
    """Its output; raises with the end of it when the program fails."""
    ended = subprocess.run(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, **OFFLINE, **environment},
    )
    if ended.returncode:
        raise RuntimeError(f"{list(command[:3])} ended with {ended.returncode}:\n{ended.stdout[-1500:]}\n{ended.stderr[-3000:]}")
    return ended.stdout


OFFLINE = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1", "NO_COLOR": "1",
    "OPENAI_AGENTS_DISABLE_TRACING": "1", "ANONYMIZED_TELEMETRY": "False", "PYTHONPATH": "", "NO_PROXY": "127.0.0.1",
}  # fmt: skip
"""None of them needs anything from outside to ask this machine."""


def answers_in(said: str) -> list[Json]:
    """The lines that a program of ours tells its answers with."""
    return [json.loads(line) for line in said.splitlines() if line.startswith('{"how"')]


def python(name: str, *packages: str, environment: str = "python") -> Client:
    """A program of tests/integration/clients."""

    def ask(place: Place) -> list[Json]:
        command = [place.program(environment, "python"), str(CLIENTS / name), place.url, place.model, PROMPT, str(MAX_TOKENS)]
        return answers_in(run(command, OPENAI_API_KEY="none"))

    return Client(ask, environment, packages)


def node(name: str, *packages: str) -> Client:
    """One for Node, which looks for packages where the program lies."""

    def ask(place: Place) -> list[Json]:
        home = place.environments / "node"
        for file in ("asked.mjs", name):
            shutil.copy(CLIENTS / file, home)
        return answers_in(run(["node", str(home / name), place.url, place.model, PROMPT, str(MAX_TOKENS)]))

    return Client(ask, "node", packages, needs="npm")


def llm(place: Place) -> list[Json]:
    """The llm command with an extra model in its settings."""
    home = place.folder / "llm"
    home.mkdir(exist_ok=True)
    settings = f"- model_id: here\n  model_name: {place.model}\n  api_base: {place.url}/v1\n  api_key_name: here\n"
    (home / "extra-openai-models.yaml").write_text(settings)
    (home / "keys.json").write_text('{"here": "none"}')
    command = [place.program("python", "llm"), "-m", "here", PROMPT, "-o", "temperature", "0", "-o", "max_tokens", str(MAX_TOKENS)]
    found = []
    for more in ([], ["--no-stream"]):
        text = run([*command, *more], LLM_USER_PATH=str(home))
        found.append({"how": "stream" if not more else "whole", "text": text.removesuffix("\n")})
    return found


def aider(place: Place) -> list[Json]:
    """A question about a folder. An answer that ends at its length is an error to aider: this one ends with a sentence."""
    home = place.folder / "aider"
    home.mkdir(exist_ok=True)
    (home / "lighthouse.py").write_text("lit = True\n")
    settings = f"- name: openai/{place.model}\n  extra_params: {{max_tokens: {2 * MAX_TOKENS}, stop: [.]}}\n"
    (home / ".aider.model.settings.yml").write_text(settings)
    words = ["--model", f"openai/{place.model}", "--openai-api-base", f"{place.url}/v1", "--openai-api-key", "none"]
    words += ["--no-git", "--yes-always", "--no-analytics", "--no-check-update", "--no-show-model-warnings", "--no-show-release-notes"]
    said = run([place.program("aider", "aider"), *words, "--chat-mode", "ask", "--message", PROMPT], home, HOME=str(home))
    if "Tokens:" not in said:
        raise RuntimeError(said[-1500:])
    return [{"how": "ask", "text": "an answer", "own": True}]


def curl(place: Place) -> list[Json]:
    """-N, HTTP/1.1, 1.0 and an offer of 2, and the request's body from a file."""
    file = place.body(stream=True)
    found = []
    for version in ("--http1.1", "--http1.0", "--http2"):
        command = ["curl", "-sS", "-N", "--fail-with-body", version, "-H", "content-type: application/json", "-d", f"@{file}"]
        said = run([*command, f"{place.url}/v1/chat/completions"])
        datas = [line[6:] for line in said.splitlines() if line.startswith("data: ")]
        if datas[-1] != "[DONE]":
            raise RuntimeError(f"no [DONE]: {said[-300:]}")
        deltas = [choice["delta"] for data in datas[:-1] for choice in json.loads(data)["choices"]]
        found.append({"how": version, "text": "".join(delta.get("content") or "" for delta in deltas)})
    return found


def java(place: Place) -> list[Json]:
    """The client that Java has, without any package."""
    command = ["java", str(CLIENTS / "Lighthouse.java"), place.url, place.model, PROMPT, str(MAX_TOKENS)]
    return answers_in(run(command))


def answered(said: str, good: str, *bad: str) -> list[Json]:
    """A load generator's own count: `good` finds how many were answered, each of `bad` how many were not, where it says so at all."""
    found = re.search(good, said)
    failed = [match[0] for pattern in bad if (match := re.search(pattern, said)) is not None and float(match[1])]
    if found is None or failed or float(found[1]) < REQUESTS:
        raise RuntimeError(f"{failed or 'too few answers'}:\n{said[-2500:]}")
    return [{"how": f"{REQUESTS} or more requests, {AT_ONCE} at once", "text": "all answered", "own": True}]


def apache_bench(place: Place) -> list[Json]:
    """ab, HTTP/1.0 with keep-alive."""
    command = ["ab", "-l", "-k", "-s", "300", "-n", str(REQUESTS), "-c", str(AT_ONCE), "-T", "application/json", "-p", str(place.body())]
    said = run([*command, f"{place.url}/v1/chat/completions"])
    return answered(said, r"Complete requests:\s+(\d+)", r"Failed requests:\s+(\d+)", r"Non-2xx responses:\s+(\d+)")


def hey(place: Place) -> list[Json]:
    """Streams."""
    command = ["hey", "-n", str(REQUESTS), "-c", str(AT_ONCE), "-t", "0", "-m", "POST", "-T", "application/json"]
    said = run([*command, "-D", str(place.body(stream=True)), f"{place.url}/v1/chat/completions"])
    return answered(said, r"\[200\]\s+(\d+) responses", r"\[[^2]\d*\]\s+(\d+) responses", r"Error distribution:\s+\[(\d+)\]")


def wrk(place: Place) -> list[Json]:
    """Twenty seconds; its count of what was answered is not known before."""
    script = place.folder / "post.lua"
    body = f'io.open("{place.body(max_tokens=4)}"):read("*a")'
    script.write_text(f'wrk.method = "POST"\nwrk.headers["content-type"] = "application/json"\nwrk.body = {body}\n')
    command = ["wrk", "-t", "1", "-c", str(AT_ONCE), "-d", "20s", "--timeout", "300s", "-s", str(script)]
    said = run([*command, f"{place.url}/v1/chat/completions"])
    return answered(said, r"(\d+) requests in", r"Non-2xx or 3xx responses: (\d+)", r"Socket errors: connect 0, read (\d+)")


def autocannon(place: Place) -> list[Json]:
    """Streams, from Node."""
    command = ["node", str(place.environments / "node/node_modules/autocannon/autocannon.js"), "--json", "-m", "POST", "-t", "300"]
    command += ["-a", str(REQUESTS), "-c", str(AT_ONCE), "-H", "content-type: application/json", "-i", str(place.body(stream=True))]
    said = run([*command, f"{place.url}/v1/chat/completions"])
    return answered(said, r'"2xx":(\d+)', r'"non2xx":(\d+)', r'"errors":(\d+)', r'"timeouts":(\d+)')


def locust(place: Place) -> list[Json]:
    """Its users stream until 24 answers are there at the earliest."""
    command = [place.program("locust", "locust"), "-f", str(CLIENTS / "locustfile.py"), "--headless", "-u", str(AT_ONCE), "-r", "6"]
    said = run(
        [*command, "-t", "60s", "--stop-timeout", "120", "--host", place.url, "--json"],
        ASKED_MODEL=place.model, ASKED_PROMPT=PROMPT, ASKED_TOKENS=str(MAX_TOKENS // 4),
    )  # fmt: skip
    (about,) = json.loads(said)
    return answered(f"{about['num_requests']} done, {about['num_failures']} failed", r"(\d+) done", r"(\d+) failed")


def vllm_bench(place: Place) -> list[Json]:
    """vLLM's own, all requests at once: most of them wait for longer than a silence of the gateway lasts."""
    words = ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--base-url", place.url, "--model", place.model]
    words += ["--tokenizer", str(place.model_dir), "--dataset-name", "random", "--random-input-len", "64", "--random-output-len", "24"]
    said = run([VLLM, "-m", "vllm.entrypoints.cli.main", "bench", "serve", *words, "--num-prompts", "40", "--ignore-eos"])
    return answered(said, r"Successful requests:\s+(\d+)", r"Failed requests:\s+(\d+)")


def guidellm(place: Place) -> list[Json]:
    """Its counts are in a file."""
    file = place.folder / "guidellm.json"
    words = ["--backend", f"kind=openai_http,target={place.url},model={place.model}", "--output", f"kind=json,path={file}"]
    words += ["--tokenizer", f"kind=huggingface_auto,model={place.model_dir}", "--profile", f"kind=concurrent,streams={AT_ONCE}"]
    words += ["--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=24", "--constraint", f"kind=max_requests,count={REQUESTS}"]
    run([place.program("guidellm", "guidellm"), "run", *words, "--disable-console"])
    totals = json.loads(file.read_text())["benchmarks"][0]["metrics"]["request_totals"]
    return answered(f"{totals['successful']} done, {totals['errored']} failed", r"(\d+) done", r"(\d+) failed")


FRAMEWORKS: dict[str, Client] = {
    "openai": python("with_openai.py", "openai"),
    "litellm": python("with_litellm.py", "litellm"),
    "langchain": python("with_langchain.py", "langchain-openai"),
    "anthropic": python("with_anthropic.py", "anthropic"),
    "llm": Client(llm, "python", ("llm",)),
    "benchmark": python("like_a_benchmark.py", "aiohttp"),
    "ollama": python("with_ollama.py", "ollama"),
    "instructor": python("with_instructor.py", "instructor"),
    "llama-index": python("with_llama_index.py", "llama-index-llms-openai-like", environment="llama-index"),
    "pydantic-ai": python("with_pydantic_ai.py", "pydantic-ai-slim[openai]"),
    "openai-agents": python("with_openai_agents.py", "openai-agents"),
    "haystack": python("with_haystack.py", "haystack-ai"),
    "smolagents": python("with_smolagents.py", "smolagents[openai]"),
    "autogen": python("with_autogen.py", "autogen-agentchat", "autogen-ext[openai]"),
    "semantic-kernel": python("with_semantic_kernel.py", "semantic-kernel", environment="semantic"),
    "outlines": python("with_outlines.py", "outlines[openai]"),
    "dspy": python("with_dspy.py", "dspy"),
    "strands": python("with_strands.py", "strands-agents[openai]", environment="strands"),
    "agno": python("with_agno.py", "agno"),
    "aider": Client(aider, "aider", ("aider-chat",)),
}
FOR_NODE: dict[str, Client] = {
    "openai-node": node("with_openai.mjs", "openai"),
    "ai-sdk": node("with_ai_sdk.mjs", "ai", "@ai-sdk/openai-compatible"),
    "langchain-node": node("with_langchain.mjs", "@langchain/openai", "@langchain/core"),
    "anthropic-node": node("with_anthropic.mjs", "@anthropic-ai/sdk"),
    "autocannon": Client(autocannon, "node", ("autocannon",), needs="npm"),
}
GENERATORS: dict[str, Client] = {
    "ab": Client(apache_bench, needs="ab"),
    "hey": Client(hey, needs="hey"),
    "wrk": Client(wrk, needs="wrk"),
    "locust": Client(locust, "locust", ("locust",)),
    "guidellm": Client(guidellm, "guidellm", ("guidellm",)),
    "vllm-bench": Client(vllm_bench, needs=VLLM),
}
BARE: dict[str, Client] = {"curl": Client(curl, needs="curl"), "java": Client(java, needs="java")}
ALL: dict[str, Client] = {**BARE, **FRAMEWORKS, **FOR_NODE, **GENERATORS}


def installed(names: Sequence[str], environments: Path) -> None:
    """All packages of these clients, each environment as a whole, and once."""
    for environment in sorted({ALL[name].environment for name in names} - {""}):
        packages = sorted({one for client in ALL.values() if client.environment == environment for one in client.packages})
        home, note = environments / environment, environments / environment / ".installed"
        if note.exists() and note.read_text().split() == packages:
            continue
        print(f"installing {', '.join(packages)} into {home}", flush=True)
        if environment == "node":
            home.mkdir(parents=True, exist_ok=True)
            subprocess.run(["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(home), *packages], check=True)
        else:
            subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
            subprocess.run([str(home / "bin/python"), "-m", "pip", "install", "-q", *packages], check=True)
        note.write_text("\n".join(packages))


def missing(name: str) -> str:
    """The program that a client cannot do without and that is not here."""
    needs = ALL[name].needs
    return needs if needs and shutil.which(needs) is None else ""
