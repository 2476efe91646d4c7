"""What a configuration names is looked at without starting anything: each trouble with its value, its limit and its cure."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable
from pathlib import Path

import pytest

from appliance import listening
from appliance.cli.checks import configured
from appliance.cli.checks.box import check_model
from appliance.cli.checks.machine import Ended, Finding, Level, Machine
from appliance.config import Config, load_config
from tests.fakes.small_disk import NEEDS_ROOT, small_disk
from tests.unit.cli.conftest import Ctl


def _config(**keys: object) -> Config:
    return load_config(None, {name.replace("__", "."): value for name, value in keys.items()}).config


def _only(found: Iterable[Finding]) -> Finding:
    (finding,) = found
    return finding


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small Llama whose weights are a hole in the file."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32", "hidden_size": 256, "vocab_size": 1000,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 512,
        "max_position_embeddings": 2048,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    header = json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [256], "data_offsets": [0, 1024]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(1024))
    return folder


@pytest.mark.parametrize("key", ["gateway__api_keys_file", "fallback__api_key_file", "gateway__tls_certificate"])
def test_a_file_that_is_not_there(key: str, tmp_path: Path) -> None:
    """It fails, with its path and the reason."""
    others = {
        "fallback__api_key_file": {"fallback__base_url": "https://api.example.com/v1"},
        "gateway__tls_certificate": {"gateway__tls_key": str(tmp_path / "key")},
    }
    finding = _only(configured.check_files(_config(**{key: str(tmp_path / "none")}, **others.get(key, {}))))
    assert (finding.level, finding.name) == (Level.FAIL, key.replace("__", "."))
    assert str(tmp_path / "none") in finding.reason
    assert "No such file or directory" in finding.reason
    assert finding.cure


def test_each_mistake_in_a_file_of_keys(tmp_path: Path) -> None:
    """All of them, a finding each."""
    file = tmp_path / "keys.toml"
    file.write_text('[alice]\nsha256 = "short"\n[bob]\npriorty = "high"\n')
    found = list(configured.check_files(_config(gateway__api_keys_file=str(file))))
    assert [finding.level for finding in found] == [Level.FAIL] * 3
    assert any("did you mean priority" in finding.reason for finding in found)


def test_a_pattern_with_a_mistake_is_a_warning(tmp_path: Path) -> None:
    """applianced goes without it, and starts."""
    (tmp_path / "mine.toml").write_text("[[pattern]]\nid = 1\n")
    finding = _only(configured.check_files(_config(diagnosis__patterns_dir=str(tmp_path))))
    assert finding.level is Level.WARN


def test_programs_that_cannot_be_run() -> None:
    """The engine's is a failure, a hook's a warning."""
    config = _config(engine__backend="custom", engine__command=["/no/engine", "{socket}"], supervisor__on_park=["/no/hook"])
    engine, hook = configured.check_programs(config)
    assert (engine.level, engine.name, "/no/engine" in engine.reason) == (Level.FAIL, "engine.command", True)
    assert (hook.level, hook.name) == (Level.WARN, "supervisor.on_park")


def test_a_kv_pool_that_no_memory_holds(model: Path) -> None:
    """Value and limit in the same sentence; the cure says what fits."""
    finding = _only(configured.check_memory(_config(engine__kv_pool_bytes="1024TiB"), model))
    assert (finding.level, finding.name) == (Level.FAIL, "engine.kv_pool_bytes")
    assert "1048576.00 GiB beside" in finding.reason
    assert "this machine has" in finding.reason
    assert "appliancectl plan --engine native" in finding.cure
    alone = _only(configured.check_memory(_config(engine__kv_pool_bytes="1024TiB"), None))
    assert (alone.level, "1048576.00 GiB and" in alone.reason) == (Level.FAIL, True), "also where no model is named"


def test_a_kv_pool_that_is_too_large_now(model: Path) -> None:
    """Somebody else's memory may be free again when the pool fills: a warning."""
    rows = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(rows[key].split()[0]) for key in ("MemTotal", "MemAvailable"))
    between_kib = (max(free, total // 2) + total) // 2 - 400 * 1024
    if not free < between_kib + 350 * 1024 < total:
        pytest.skip("this machine has all its memory free")
    finding = _only(configured.check_memory(_config(engine__kv_pool_bytes=between_kib * 1024), model))
    assert (finding.level, "are free now" in finding.reason) == (Level.WARN, True)


def test_a_context_that_the_model_does_not_have(model: Path) -> None:
    """Both numbers."""
    finding = _only(configured.check_memory(_config(engine__context_length_tokens=4096, engine__kv_pool_bytes="16MiB"), model))
    assert (finding.level, finding.name) == (Level.FAIL, "engine.context_length_tokens")
    assert "4,096 tokens: the model's own limit is 2,048" in finding.reason


def test_a_state_folder_that_is_a_file(tmp_path: Path) -> None:
    """Or lies below one."""
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        finding = _only(configured.check_state_dir(folder))
        assert (finding.level, f"{tmp_path / 'file'} is no folder" in finding.reason) == (Level.FAIL, True)


@NEEDS_ROOT
@pytest.mark.parametrize(
    ("options", "level", "words"), [("ro", Level.FAIL, "mounted read-only"), ("size=1m", Level.WARN, "1.00 MiB are free")]
)
def test_a_state_folder_on_a_disk_that_takes_nothing(options: str, level: Level, words: str, tmp_path: Path) -> None:
    """Read-only ends the start of `run`; a nearly full one costs records."""
    with small_disk(tmp_path / "disk", options) as disk:
        finding = _only(configured.check_state_dir(disk / "state"))
        assert (finding.level, words in finding.reason) == (level, True)
        assert not (disk / "state").exists()


def test_a_port_that_somebody_has(tmp_path: Path) -> None:
    """Named with its holder; it is only held for a moment by us, so that it is free afterwards."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        finding = _only(configured.check_address(Machine(), _config(gateway__port=port)))
    assert (finding.level, finding.name) == (Level.FAIL, "gateway.port")
    assert f"port {port} on 127.0.0.1 is taken by" in finding.reason
    assert list(configured.check_address(Machine(), _config(gateway__port=port))) == []


@pytest.mark.parametrize(("unit", "found"), [(0, []), (3, ["gateway.port"])])
def test_a_port_that_systemd_holds_for_the_gateway(monkeypatch: pytest.MonkeyPatch, unit: int, found: list[str]) -> None:
    """Is in good hands; one that it holds for somebody else is not."""
    monkeypatch.setattr(listening, "holder_of", lambda port: "systemd (pid 1)")
    machine = Machine(run=lambda command: Ended(unit if command[-1] == "llm-appliance-gateway.socket" else None))
    with socket.create_server(("127.0.0.1", 0)) as holder:
        findings = list(configured.check_address(machine, _config(gateway__port=holder.getsockname()[1])))
    assert [finding.name for finding in findings] == found


def test_an_address_that_is_open_to_others_is_named_as_it_was_given() -> None:
    """Not as the address that a client here would use."""
    finding = _only(configured.check_address(Machine(), _config(gateway__host="0.0.0.0", gateway__port=0)))
    assert finding.level is Level.FAIL
    assert finding.reason.startswith("0.0.0.0:")


def test_an_open_address_is_named_also_where_the_appliance_holds_its_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a box that serves, before its owner opens it to others without a key."""
    monkeypatch.setattr(listening, "holder_of", lambda port: "systemd (pid 1)")
    machine = Machine(run=lambda command: Ended(0))
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        finding = _only(configured.check_address(machine, _config(gateway__host="0.0.0.0", gateway__port=port)))
    assert (finding.level, finding.name) == (Level.FAIL, "gateway.host")
    assert finding.reason.startswith(f"0.0.0.0:{port} would be open")


def test_config_check_tells_what_would_end_a_start(ctl: Ctl, tmp_path: Path) -> None:
    """Exit code 1 for a failure, each with its cure; nothing is made."""
    state = tmp_path / "state"
    wrong = ["--set", "gateway.port=0", "--set", f"gateway.api_keys_file={tmp_path}/none", "--set", "model.path=/no/model"]
    said = ctl("--state-dir", state, "config", "check", *wrong)
    assert said.code == 1
    assert "fail model: /no/model: No such file or directory" in said.out
    assert f"fail gateway.api_keys_file: {tmp_path}/none: cannot be read" in said.out
    assert said.out.count("cure:") == 2
    assert not state.exists()
    document = json.loads(ctl("--state-dir", state, "config", "check", "--json", *wrong).out)
    assert (document["ok"], document["errors"]) == (False, [])
    assert [row["level"] for row in document["findings"]] == ["fail", "fail"]


def test_a_warning_alone_is_no_failure(ctl: Ctl, tmp_path: Path, model: Path) -> None:
    """Exit code 0, and the file is still said to be good."""
    keys = ["--set", "gateway.port=0", "--set", f"model.path={model}", "--set", "engine.kv_pool_bytes=1MiB"]
    said = ctl("--state-dir", tmp_path, "config", "check", *keys, "--set", 'supervisor.on_park=["/no/hook"]')
    assert said.code == 0
    assert "warn supervisor.on_park" in said.out
    assert said.out.rstrip().splitlines()[-1].startswith("ok ")


def test_arguments_for_an_engine_of_others_are_judged(tmp_path: Path) -> None:
    """What its parser would refuse, what is ours to set, and what is dangerous; other words pass."""
    words = ["--disable-flashinfer", "--mem-fraction-static", "0.9", "--log-requests", "--tool-call-parser", "qwen3_coder"]
    config = _config(engine__backend="sglang", engine__version="0.5.17", engine__extra_args=words)
    gone, ours, danger = configured.check_options(config)
    assert (gone.level, ours.level, danger.level) == (Level.FAIL, Level.FAIL, Level.WARN)
    assert "--attention-backend triton" in gone.reason
    assert "budget.mem_fraction" in ours.reason
    assert "journal" in danger.reason
    assert not list(configured.check_options(_config(engine__extra_args=["--anything"])))


def test_an_engine_of_others_has_to_be_there(tmp_path: Path) -> None:
    """llama-server by its path, the others by the interpreter of their environment."""
    program = _only(configured.check_engine_of_others(_config(engine__backend="llamacpp", engine__program=str(tmp_path / "none"))))
    assert (program.name, program.level) == ("engine.program", Level.FAIL)
    python = tmp_path / "env/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to("/bin/true")
    libraries = tmp_path / "env/lib/python3.11/site-packages"
    libraries.mkdir(parents=True)
    config = _config(engine__backend="vllm", engine__python=str(python))
    assert "with vllm" in _only(configured.check_engine_of_others(config)).reason
    (libraries / "vllm-0.32.0.dist-info").mkdir()
    assert not list(configured.check_engine_of_others(config))


def test_a_gguf_file_is_a_model_for_llama_cpp(tmp_path: Path) -> None:
    """Its path is that of a file."""
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    finding = _only(check_model(_config(engine__backend="llamacpp", model__path=str(file)), tmp_path))
    assert (finding.level, finding.reason) == (Level.OK, str(file))
