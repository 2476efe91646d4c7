"""Rungs to command lines."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.backends import backend_of
from appliance.config.schema import Config, EngineTable, ModelTable
from appliance.core.errors import ConfigError, ModelError
from appliance.core.launch import SpareSpec
from appliance.core.plan import Rung
from appliance.engine.__main__ import parse_arguments, settings_of
from appliance.supervisor.ladder import facts_of
from tests.unit.supervisor.machine_cases import make_rung


def make_model(folder: Path, **config: object) -> Path:
    """A folder that looks like a model."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 2048} | config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def native(folder: Path, **engine: object) -> Config:
    """A configuration of the built-in engine."""
    return replace(Config(), model=ModelTable(path=str(folder), name="demo"), engine=replace(EngineTable(), **engine))  # type: ignore[arg-type]


def test_the_engine_understands_the_native_command_line(tmp_path: Path) -> None:
    """Every option of the argv is one that `python -m appliance.engine` takes, with the value of the rung."""
    config = native(make_model(tmp_path / "m"), threads=2, prefill_chunk_tokens=64, max_running=4)
    backend = backend_of(config)
    rung = replace(backend.first_rung(config), index=2, prefill_chunk_tokens=32, max_running=2)
    spec = backend.launch_spec(config, rung, 7, tmp_path)
    assert spec.argv[:3] == (sys.executable, "-m", "appliance.engine")
    assert str(spec.endpoint) == f"unix:{tmp_path}/engine-7.sock"
    settings = settings_of(parse_arguments(spec.argv[3:]))
    assert (settings.model_path, settings.model_name, settings.threads) == ((tmp_path / "m").resolve(), "demo", 2)
    assert (settings.prefill_chunk_tokens, settings.max_running, settings.context_length_tokens) == (32, 2, 0)
    argv = backend.launch_spec(config, replace(rung, context_length_tokens=1024), 8, tmp_path).argv
    assert settings_of(parse_arguments(argv[3:])).context_length_tokens == 1024


def test_a_spare_fits_every_rung_and_no_other_model(tmp_path: Path) -> None:
    """It knows what rungs never change; the rest is told. Other threads or other files need another spare; it can be switched off."""
    folder = make_model(tmp_path / "m")
    config = native(folder, threads=2)
    backend = backend_of(config)
    rung = backend.first_rung(config)

    def spare_of(config: Config, rung: Rung = rung) -> SpareSpec | None:
        return backend.launch_spec(config, rung, 7, tmp_path).spare

    spare = spare_of(config)
    assert spare is not None
    settings = parse_arguments(spare.argv[3:])
    assert (settings.spare, settings.socket, settings.model, settings.threads) == (True, None, folder.resolve(), 2)
    assert spare == spare_of(config, replace(rung, index=3, prefill_chunk_tokens=32, max_running=1, context_length_tokens=512))
    assert spare == spare_of(native(folder, threads=2, kv_pool_bytes=2**26))
    assert spare != spare_of(native(folder, threads=1))
    assert spare != spare_of(native(make_model(tmp_path / "n"), threads=2))
    assert spare_of(native(folder, threads=2, warm_spare=False)) is None
    (folder / "model.safetensors").write_bytes(b"other")
    changed = spare_of(config)
    assert changed is not None
    assert (changed.argv, changed.env) == (spare.argv, spare.env)
    assert changed != spare
    (folder / "convert.log").write_text("not a file that an engine reads")
    assert spare_of(config) == changed


def test_the_built_in_engine_on_a_card(tmp_path: Path) -> None:
    """It is waited for and watched like another engine's; the engine is told where and in what, and has no spare, which would need the
    card's memory once more."""
    config = native(make_model(tmp_path / "m"), device="cuda", weights_dtype="float16")
    backend = backend_of(config)
    rung = backend.first_rung(config)
    spec = backend.launch_spec(config, rung, 7, tmp_path)
    settings = settings_of(parse_arguments(spec.argv[3:]))
    assert (settings.device, settings.weights_dtype, rung.kv_dtype) == ("cuda", "float16", "float16")
    assert (backend.uses_gpu, spec.spare) == (True, None)
    assert facts_of(config) is None  # the planner knows its memory on the CPU
    assert backend.first_rung(native(tmp_path / "m", device="cuda")).kv_dtype == "bfloat16"
    assert not backend_of(native(tmp_path / "m")).uses_gpu


@pytest.mark.parametrize(
    ("engine", "words", "cure"),
    [
        ({"weights_dtype": "bfloat16"}, 'weights_dtype = "bfloat16" is for a card', "engine.device"),
        ({"device": "cuda", "weight_holder": True}, "engine.weight_holder keeps weights in the host's memory", "to false"),
    ],
)
def test_what_a_device_cannot_do_is_not_started(engine: dict[str, object], words: str, cure: str, tmp_path: Path) -> None:
    """Named with its cure, before there is a process."""
    config = native(make_model(tmp_path / "m"), **engine)
    backend = backend_of(config)
    with pytest.raises(ConfigError, match=words) as caught:
        backend.launch_spec(config, backend.first_rung(config), 7, tmp_path)
    assert cure in str(caught.value.hint)


def test_rung_zero_leaves_the_context_to_the_engine(tmp_path: Path) -> None:
    """As configured means as configured, on every rung that does not touch it: 0 is resolved by the engine, which knows its KV pool."""
    config = native(make_model(tmp_path / "m"))
    backend = backend_of(config)
    argv = backend.launch_spec(config, backend.first_rung(config), 1, tmp_path).argv
    assert argv[argv.index("--context-length") + 1] == "0"


def test_the_environment_is_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of ours leaks in: no PYTHONPATH, no notify socket; files beside the engine are not imported; threads are bounded."""
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/systemd/notify")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    config = native(make_model(tmp_path / "m"))
    backend = backend_of(config)
    env = backend.launch_spec(config, backend.first_rung(config), 1, tmp_path).env
    assert set(env) <= {
        "PATH",
        "LANG",
        "PYTHONSAFEPATH",
        "PYTHONUNBUFFERED",
        "OMP_NUM_THREADS",
        "HOME",
        "TMPDIR",
        "TZ",
        "CUDA_VISIBLE_DEVICES",
    }
    assert env["PYTHONSAFEPATH"] == "1"
    assert env["OMP_NUM_THREADS"] == str(len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda folder: "", ("model.path is not set", "setup --demo")),
        (lambda folder: str(folder / "nowhere"), ("nowhere", "does not exist")),
        (lambda folder: str(folder / "config.json"), ("is no folder",)),
        (lambda folder: (folder / "model.safetensors").unlink() or str(folder), ("lacks *.safetensors", "not complete")),
        (lambda folder: (folder / "tokenizer.json").unlink() or str(folder), ("lacks tokenizer.json",)),
    ],
)
def test_a_model_that_cannot_be_served_is_named(tmp_path: Path, break_it: object, words: tuple[str, ...]) -> None:
    """Missing, no folder, half-written: refused before anything starts, with the cure."""
    folder = make_model(tmp_path / "m")
    path = break_it(folder)  # type: ignore[operator]
    config = replace(Config(), model=ModelTable(path=path))
    with pytest.raises(ModelError) as caught:
        backend_of(config).launch_spec(config, backend_of(config).first_rung(config), 1, tmp_path)
    for word in words:
        assert word in str(caught.value)


def custom(*command: str, **engine: object) -> Config:
    """A configuration of somebody's own engine."""
    return replace(Config(), engine=EngineTable(backend="custom", command=command, **engine))  # type: ignore[arg-type]


def test_a_custom_command_is_filled_in(tmp_path: Path) -> None:
    """Its words in braces become the address and the rung's values; other braces stay."""
    config = custom("srv", "--uds", "{socket}", "-c={context_length}", '{"a": 1}', context_length_tokens=4096, extra_args=("-v",))
    backend = backend_of(config)
    spec = backend.launch_spec(config, backend.first_rung(config), 2, tmp_path)
    assert spec.argv == ("srv", "--uds", f"{tmp_path}/engine-2.sock", "-c=4096", '{"a": 1}', "-v")
    assert spec.engine == "custom"


def test_a_custom_engine_may_listen_on_a_port(tmp_path: Path) -> None:
    """{port} becomes a free loopback port, and the endpoint is that port."""
    config = custom("srv", "--port={port}")
    backend = backend_of(config)
    spec = backend.launch_spec(config, backend.first_rung(config), 1, tmp_path)
    assert spec.argv == ("srv", f"--port={spec.endpoint.port}")
    assert spec.endpoint.port


def test_a_custom_engine_is_told_what_its_command_takes() -> None:
    """A command that takes nothing of the rung is the same on every rung."""
    backend, rung = backend_of(custom("srv", "{socket}")), make_rung(max_running=5, context_length_tokens=77)
    assert backend.told(custom("srv", "{socket}"), rung) == ()
    assert backend.told(custom("srv", "-n={max_running}", extra_args=("{context_length}",)), rung) == (77, 5)
