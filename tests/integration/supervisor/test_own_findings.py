"""What applianced finds out itself about an engine of its own is named, with the key of the configuration to change."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.model_folder import byte_level_folder
from tests.integration.supervisor.harness import Applianced, wait_for

Start = Callable[..., Applianced]
NATIVE = {"engine.backend": "native", "engine.warm_spare": "false", "engine.threads": "1", "supervisor.start_failures_max": "2"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer, with weights that are sound."""
    return model_folder(tmp_path_factory.mktemp("tiny"))


def model_folder(folder: Path, poison: float = 0.0) -> Path:
    """A Llama of one layer; `poison` is added to the last norm."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((byte_level_folder(folder) / "config.json").read_text())
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    config |= shape | {"head_dim": 32, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 256, "hidden_act": "silu"}
    config |= {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    sizes = {"self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64), "self_attn.o_proj": (64, 64)}
    sizes |= {"mlp.gate_proj": (128, 64), "mlp.up_proj": (128, 64), "mlp.down_proj": (64, 128)}
    torch.manual_seed(1)
    weights = {f"model.layers.0.{name}.weight": torch.randn(*size) * 0.1 for name, size in sizes.items()}
    weights |= {f"model.layers.0.{name}.weight": torch.ones(64) for name in ("input_layernorm", "post_attention_layernorm")}
    weights |= {"model.norm.weight": torch.ones(64) + poison, "model.embed_tokens.weight": torch.randn(config["vocab_size"], 64) * 0.1}
    save_file(weights, folder / "model.safetensors")
    return folder


def parked(applianced: Start, model: Path, **settings: str) -> dict[str, Any]:
    """The incident, once applianced has given up."""
    one = applianced(settings=NATIVE | {"model.path": str(model)} | settings)
    wait_for(lambda: one.status().get("state") == "parked", "applianced gives up", 90)  # after two starts of a real engine
    incident: dict[str, Any] = one.ask("incident")["incident"]
    return incident


def test_an_argument_that_the_engine_does_not_take(applianced: Start, tiny: Path) -> None:
    """The parser of the real engine refuses it: named with its key, and parked at the first time."""
    incident = parked(applianced, tiny, **{"engine.extra_args": '["--no-such-flag=s3cret"]'})
    assert (incident["diagnosis"]["cause"], incident["action"]["kind"], incident["generation"]) == ("engine_config", "park", 1)
    assert "--no-such-flag" in incident["diagnosis"]["sentence"]
    assert "engine.extra_args" in incident["diagnosis"]["sentence"]
    assert "Take --no-such-flag out of engine.extra_args" in incident["diagnosis"]["remedies"][0]


@pytest.mark.parametrize("python", ["/no/such/python", "/etc", "/etc/passwd", "/bin/true", "/bin/false"])
def test_an_interpreter_that_is_none(applianced: Start, tiny: Path, python: str) -> None:
    """Not there, a folder, a file that cannot be run, a program that leaves at once: engine.python is named, with what stands there."""
    incident = parked(applianced, tiny, **{"engine.python": python})
    assert (incident["diagnosis"]["cause"], incident["action"]["kind"], incident["generation"]) == ("engine_config", "park", 1)
    assert python in incident["diagnosis"]["sentence"]
    assert "engine.python" in incident["diagnosis"]["remedies"][0]


def test_an_interpreter_without_the_engine(applianced: Start, tiny: Path, tmp_path: Path) -> None:
    """A Python of another environment: which module it lacks."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    incident = parked(applianced, tiny, **{"engine.python": str(python)})
    assert incident["diagnosis"]["cause"] == "engine_config"
    assert "has no module appliance" in incident["diagnosis"]["sentence"]


def test_a_pool_that_the_machine_cannot_have(applianced: Start, tiny: Path) -> None:
    """10 TiB: not a host that ran out of memory, but a number in the configuration."""
    incident = parked(applianced, tiny, **{"engine.kv_pool_bytes": "10TiB"})
    assert (incident["diagnosis"]["cause"], incident["action"]["kind"]) == ("engine_config", "park")
    assert "engine.kv_pool_bytes = 10240.00 GiB" in incident["diagnosis"]["sentence"]


def test_a_model_that_computes_nonsense(applianced: Start, tmp_path: Path) -> None:
    """NaN in its weights: the proof's own answer says so, and the verdict too; it is tried once more, then parked."""
    incident = parked(applianced, model_folder(tmp_path / "nan", float("nan")), **{"engine.kv_pool_bytes": "16MiB"})
    assert incident["diagnosis"]["cause"] == "bad_numbers"
    assert "NaN" in incident["diagnosis"]["root"]["text"]
    assert "model.path" in incident["diagnosis"]["remedies"][0]


def test_a_deadline_that_is_too_short(applianced: Start) -> None:
    """It computes past supervisor.start_deadline_s: the key is named with its value, and no safer rung is blamed or tried."""
    settings = {"supervisor.start_deadline_s": "1", "supervisor.start_failures_max": "2", "supervisor.start_stall_s": "1"}
    one = applianced("--load", "compute", "--ready-after-s", "600", settings=settings)
    one.wait_state("parked")
    first = one.ask("incidents", limit=5)["incidents"][-1]
    assert (first["diagnosis"]["cause"], first["action"]["kind"]) == ("start_timeout", "restart_same")
    assert "1.00 s after it was begun" in first["diagnosis"]["sentence"]
    assert "supervisor.start_deadline_s" in first["diagnosis"]["remedies"][0]


def test_a_kill_of_somebody_else_is_not_ours(applianced: Start, tmp_path: Path) -> None:
    """The kernel kills a python3 of another container while the engine dies of its own fault, and then one of the engine's."""
    kernel = tmp_path / "kmsg"
    os.mkfifo(kernel)
    one = applianced(settings={"diagnosis.kernel_log": str(kernel)})
    before = one.wait_state("serving")
    where = "cpuset=x,mems_allowed=0,oom_memcg=/docker/9b,task_memcg=/docker/9b"
    line = f"oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),{where},task=python3,pid={{}},uid=0\n"
    with kernel.open("w") as out:
        out.write(line.format(2_000_000_001))
    one.fault(kind="exit", code=3)
    one.wait_state("serving", above=1)
    (foreign,) = one.wait_incident()
    assert foreign["diagnosis"]["cause"] == "unknown"
    with kernel.open("w") as out:
        out.write(line.format(one.status()["engine_pid"]))
    one.fault(kind="signal", signal="SIGKILL")
    one.wait_state("serving", above=2)
    assert one.wait_incident(2)[0]["diagnosis"]["cause"] == "host_oom"
    assert before["generation"] == 1
