"""`appliancectl import`: what people ran before, as a configuration that config check takes, with every word accounted for."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from appliance.cli.command_lines import from_unit, from_words
from appliance.config import load_config
from appliance.core.errors import ApplianceError
from tests.unit.cli.conftest import Ctl

SGLANG = (
    "/opt/sglang/bin/python -m sglang.launch_server --model-path /srv/m --tp 2 --mem-fraction-static 0.88 --host 0.0.0.0 --port 30000 "
    "--api-key sk-hidden --disable-flashinfer --tool-call-parser qwen3_coder --chunked_prefill_size=1024 --disable-radix-cache"
)
VLLM = "vllm serve /srv/m --max-model-len 32k --gpu-memory-utilization 0.9 --enable-prefix-caching --enforce-eager -tp 2 --max-num-seqs 4"
LLAMA = "/usr/bin/llama-server -m /m/x.gguf -c 32768 -ngl 99 -fa on -np 4 -ctk q8_0 -ctv q8_0 --jinja -t 8"
DOCKER = (
    "sudo docker run -d --gpus all -p 9000:8000 -v /srv/models:/m -e NCCL_DEBUG=INFO -e HF_TOKEN=hf_hidden --ipc=host "
    "vllm/vllm-openai:v0.20.0 --model /m/Qwen3-8B --kv-cache-dtype fp8"
)
UNIT = """
[Service]
Environment="NCCL_P2P_DISABLE=1" CUDA_VISIBLE_DEVICES=0,1
EnvironmentFile=/etc/sglang.env
ExecStart=/opt/sglang/bin/python -m sglang.launch_server \\
    --model-path "/srv/my model" --context-length 65536
Restart=always
"""
CASES = {
    SGLANG: {
        "model": {"path": "/srv/m"},
        "engine": {
            "backend": "sglang", "python": "/opt/sglang/bin/python", "tensor_parallel": 2, "prefill_chunk_tokens": 1024,
            "prefix_cache": False, "extra_args": ["--tool-call-parser", "qwen3_coder"],
        },
        "budget": {"mem_fraction": 0.88}, "gateway": {"port": 30000},
    },
    VLLM: {
        "model": {"path": "/srv/m"}, "budget": {"mem_fraction": 0.9},
        "engine": {
            "backend": "vllm", "context_length_tokens": 32000, "tensor_parallel": 2, "max_running": 4, "extra_args": ["--enforce-eager"],
        },
    },
    LLAMA: {
        "model": {"path": "/m/x.gguf"},
        "engine": {
            "backend": "llamacpp", "program": "/usr/bin/llama-server", "context_length_tokens": 32768, "max_running": 4,
            "kv_dtype": "q8_0", "threads": 8,
        },
    },
    DOCKER: {
        "model": {"path": "/srv/models/Qwen3-8B"}, "gateway": {"port": 9000},
        "engine": {"backend": "vllm", "kv_dtype": "fp8", "environment": ["NCCL_DEBUG=INFO"]},
    },
}  # fmt: skip


@pytest.mark.parametrize("line", CASES)
def test_a_command_line_becomes_a_file_for_conf_d(ctl: Ctl, tmp_path: Path, line: str) -> None:
    """Exactly these keys, and the loader takes them; secrets are in no line of it."""
    said = ctl("import", "--", *line.split())
    assert said.code == 0, said.err
    assert tomllib.loads(said.out) == CASES[line]
    (tmp_path / "imported.toml").write_text(said.out)
    load_config(tmp_path / "imported.toml")
    assert "hidden" not in said.out


@pytest.mark.parametrize("line", CASES)
def test_every_word_is_somewhere(ctl: Ctl, line: str) -> None:
    """In a key, in extra_args, or named among what was dropped."""
    said = json.loads(ctl("import", "--json", "--", *line.split()).out)
    told = json.dumps(said)
    options = [word.partition("=")[0] for word in line.split() if word.startswith("-")]
    keyed = {
        *("--model-path", "--tp", "--mem-fraction-static", "--port", "--chunked_prefill_size", "--disable-radix-cache", "--max-model-len"),
        *("--gpu-memory-utilization", "-tp", "--max-num-seqs", "-m", "-c", "-np", "-ctk", "-t", "-p", "-v", "-e", "--model"),
        "--kv-cache-dtype",
    }  # fmt: skip
    assert [option for option in options if option not in keyed and option not in told] == []


def test_a_unit_is_read(ctl: Ctl, tmp_path: Path) -> None:
    """With its lines that go on, its quotations and its environment."""
    unit = tmp_path / "sglang.service"
    unit.write_text(UNIT)
    said = ctl("import", "unit", unit)
    assert ctl("import", "--unit", unit) == said
    found = tomllib.loads(said.out)
    assert found["model"] == {"path": "/srv/my model"}
    assert found["engine"]["environment"] == ["NCCL_P2P_DISABLE=1", "CUDA_VISIBLE_DEVICES=0,1"]
    assert "EnvironmentFile=/etc/sglang.env" in said.out


@pytest.mark.parametrize(
    ("words", "code", "hint"),
    [
        (("ollama", "serve"), 1, "GGUF"),
        (("python", "server.py"), 1, "llama-server"),
        (("docker", "run", "--gpus", "all"), 1, "no image"),
        ((), 2, "unit FILE"),
        (("unit", "/no/such.service"), 2, "/no/such.service cannot be read: No such file"),
    ],
)
def test_what_cannot_be_read_is_said(ctl: Ctl, words: tuple[str, ...], code: int, hint: str) -> None:
    """With what could be."""
    said = ctl("import", "--", *words)
    assert (said.code, said.out) == (code, "")
    assert hint in said.err


def test_values_that_are_none_are_dropped_and_named(ctl: Ctl) -> None:
    """And nothing is guessed."""
    said = ctl("import", "--", "vllm", "serve", "Qwen/Qwen3-8B", "--max-num-seqs", "many", "--max-model-len", "1K")
    assert "max_running" not in tomllib.loads(said.out)["engine"]
    assert "'many' is no value for engine.max_running" in said.out
    assert tomllib.loads(said.out)["engine"]["context_length_tokens"] == 1024
    assert "looks like a name on a hub" in said.out


def test_a_unit_that_starts_nothing_and_open_quotations() -> None:
    """Are told apart from each other."""
    with pytest.raises(ApplianceError, match="no ExecStart"):
        from_unit("[Service]\nType=oneshot\n")
    with pytest.raises(ApplianceError, match="close the quotation"):
        from_unit('ExecStart=/usr/bin/llama-server -m "/x\n')
    assert from_words(["env", "A=1", "nice", "llama-server"]).environment == ("A=1",)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--unit", "/"), "/ cannot be read: Is a directory"),
        (("--unit", "/dev/null", "--", "vllm", "serve", "x"), "either unit FILE or a command line"),
    ],
)
def test_a_unit_that_is_none_and_a_unit_with_a_command_line_are_usage(ctl: Ctl, arguments: tuple[str, ...], words: str) -> None:
    """Exit code 2."""
    said = ctl("import", *arguments)
    assert (said.code, said.out) == (2, "")
    assert words in said.err
