"""SGLang, vLLM and llama.cpp: what they are started with, and how what they say is read."""

from __future__ import annotations

import json
import struct
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.backends import Backend, backend_of, llamacpp, sglang, vllm
from appliance.config.schema import Config, EngineTable, ModelTable
from appliance.core.errors import ConfigError, ModelError
from appliance.core.launch import ContinuesBy, EngineLimits, LaunchSpec

ASSUMED = EngineLimits("demo", 8192, 4, 0, continues_by=ContinuesBy.MESSAGE)


def environment(folder: Path, engine: str, version: str) -> Path:
    """The interpreter of one that has the engine."""
    (folder / "lib/python3.11/site-packages" / f"{engine}-{version}.dist-info").mkdir(parents=True)
    (folder / "bin").mkdir()
    python = folder / "bin" / "python"
    python.symlink_to(sys.executable)
    return python


def model(folder: Path, **text: object) -> Path:
    """A folder that looks like a model."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": 40960} | text}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def configured(tmp_path: Path, engine: str, version: str, **keys: object) -> Config:
    """With an environment and a model of its own."""
    python = environment(tmp_path / "env", engine, version)
    table = replace(EngineTable(backend=engine, python=str(python)), **keys)  # type: ignore[arg-type]
    return replace(Config(), model=ModelTable(str(model(tmp_path / "model")), "demo"), engine=table)


def started(config: Config, tmp_path: Path) -> tuple[Backend, LaunchSpec]:
    """On rung 0, as the third life."""
    backend = backend_of(config)
    return backend, backend.launch_spec(config, backend.first_rung(config), 3, tmp_path)


def value(spec: LaunchSpec, option: str) -> str:
    """What follows it."""
    return spec.argv[spec.argv.index(option) + 1]


def test_sglang_is_started_with_everything_said(tmp_path: Path) -> None:
    """Its version is the installed one; the environment keeps it from hurting itself; the owner's variables win."""
    config = configured(tmp_path, "sglang", "0.5.17", extra_args=("--tool-call-parser", "qwen3_coder"), environment=("NCCL_DEBUG=INFO",))
    backend, spec = started(config, tmp_path)
    assert backend.version == "0.5.17"
    assert spec.argv[:3] == (config.engine.python, "-m", "sglang.launch_server")
    assert (value(spec, "--host"), value(spec, "--port")) == ("127.0.0.1", str(spec.endpoint.port))
    assert value(spec, "--context-length") == "40960"
    assert value(spec, "--chunked-prefill-size") == "2048"
    assert spec.argv[-2:] == ("--tool-call-parser", "qwen3_coder")
    for name in (
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "SGLANG_PYSPY_DUMP_BEFORE_CRASH",
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE",
    ):  # fmt: skip
        assert spec.env[name] == "0"
    assert spec.env["SGLANG_REQUEST_STATE_WAIT_TIMEOUT"] == "10"
    assert spec.env["NCCL_DEBUG"] == "INFO"
    assert spec.env["PATH"].startswith(str(tmp_path / "env/bin"))


def test_a_hybrid_model_gets_its_state_slots(tmp_path: Path) -> None:
    """Three for each sequence, in 16 bits, said: SGLang's own default gives the state nearly half of the memory."""
    config = configured(tmp_path, "sglang", "0.5.17", max_running=3)
    (tmp_path / "model/config.json").write_text(json.dumps({"layer_types": ["linear_attention", "full_attention"]}))
    _, spec = started(config, tmp_path)
    assert value(spec, "--max-mamba-cache-size") == "9"
    assert value(spec, "--mamba-ssm-dtype") == "bfloat16"
    _, alone = started(replace(config, engine=replace(config.engine, prefix_cache=False)), tmp_path)
    assert value(alone, "--max-mamba-cache-size") == "3"


def test_an_argument_that_cannot_stand_there_stops_the_start_and_a_danger_does_not(tmp_path: Path) -> None:
    """The refusal says what to write; the danger is a note of the command line."""
    config = configured(tmp_path, "sglang", "0.5.17", extra_args=("--disable-flashinfer",))
    with pytest.raises(ConfigError, match="--attention-backend triton"):
        started(config, tmp_path)
    _, spec = started(replace(config, engine=replace(config.engine, extra_args=("--crash-dump-folder", "/x"))), tmp_path)
    assert [note for note in spec.notes if "--crash-dump-folder" in note and "what clients asked" in note]


def test_a_kv_cache_that_no_rung_can_lower_is_remarked_on(tmp_path: Path) -> None:
    """vLLM's variable for CPUs stands above the fraction that rungs lower."""
    config = configured(tmp_path, "vllm", "0.32.0", environment=("VLLM_CPU_KVCACHE_SPACE=1",))
    assert [note for note in started(config, tmp_path)[1].notes if "budget.mem_fraction" in note]
    _, spec = started(replace(config, engine=replace(config.engine, environment=())), tmp_path)
    assert spec.notes == ()


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_an_environment_without_the_engine_is_named(tmp_path: Path, engine: str) -> None:
    """And how to name another."""
    config = configured(tmp_path, "other", "1.0")
    for python, words in ((config.engine.python, f"has no {engine}"), (str(tmp_path / "nowhere"), "does not exist")):
        with pytest.raises(ConfigError) as caught:
            started(replace(config, engine=EngineTable(backend=engine, python=python)), tmp_path)
        assert words in str(caught.value)
        assert "engine.python" in str(caught.value)


def test_a_build_for_cpus_is_the_same_engine(tmp_path: Path) -> None:
    """vllm-cpu is vLLM."""
    config = configured(tmp_path, "vllm_cpu", "0.32.0")
    assert backend_of(replace(config, engine=replace(config.engine, backend="vllm"))).version == "0.32.0"


def test_a_model_folder_that_is_not_whole_is_named(tmp_path: Path) -> None:
    """Before anything starts."""
    config = configured(tmp_path, "vllm", "0.32.0")
    (tmp_path / "model/tokenizer.json").unlink()
    (tmp_path / "model/model.safetensors").unlink()
    with pytest.raises(ModelError) as caught:
        started(config, tmp_path)
    assert "a tokenizer" in str(caught.value)
    assert "weights" in str(caught.value)


LOADS = {
    "timestamp": "2026-11-30T07:00:00+00:00", "version": "0.5.17", "accelerator": "NVIDIA GeForce RTX 3090", "num_accelerators": 1,
    "loads": [{"timestamp": 1796020782.125, "dp_rank": 0, "num_running_reqs": 2, "num_waiting_reqs": 1, "num_waiting_uncached_tokens": 70,
               "num_used_tokens": 9000, "num_total_tokens": 9070, "max_total_num_tokens": 105256, "max_running_requests": 3,
               "token_usage": 0.08, "gen_throughput": 38.2, "cache_hit_rate": 0.0, "utilization": 0.0,
               "total_prefill_uncached_tokens": 12000, "total_prefill_busy_us": 1}],
}  # fmt: skip
"""As sglang/srt/entrypoints/v1_loads.py of 0.5.17 lays it out."""


def loads(**changes: object) -> bytes:
    """The same, with something else in the one snapshot."""
    return json.dumps({**LOADS, "loads": [{**LOADS["loads"][0], **changes}]}).encode()  # type: ignore[dict-item]


def test_sglangs_snapshot_tells_progress() -> None:
    """While requests run, a newer snapshot is progress; while none do, only computed tokens are, for it is written while idle as well."""
    found = sglang.counters_of(loads())
    assert (found.running, found.waiting, found.kv_blocks_used, found.counts_requests) == (2, 1, 9000, True)
    assert found.progress != sglang.counters_of(loads(timestamp=1796020782.5)).progress
    assert found == sglang.counters_of(loads())
    idle = sglang.counters_of(loads(num_running_reqs=0, num_waiting_reqs=0))
    assert idle == sglang.counters_of(loads(num_running_reqs=0, num_waiting_reqs=0, timestamp=1796020799.0))
    assert idle != sglang.counters_of(loads(num_running_reqs=0, num_waiting_reqs=0, total_prefill_uncached_tokens=12001))
    assert not sglang.counters_of(b"<html>").counts_requests


def test_sglangs_limits_are_those_of_its_pool() -> None:
    """A context larger than the KV cache is silently allowed by it, and not by us."""
    said = {
        "served_model_name": "demo", "context_length": 262144, "max_total_num_tokens": 105256, "max_req_input_len": 105250,
        "internal_states": [{"effective_max_running_requests_per_dp": 3}],
    }  # fmt: skip
    assert sglang.limits_of(json.dumps(said).encode(), ASSUMED) == EngineLimits(
        "demo", 105256, 3, 105256, max_prompt_tokens=105250, continues_by=ContinuesBy.MESSAGE
    )
    assert sglang.limits_of(b"{}", ASSUMED) == ASSUMED


VLLM_METRICS = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="demo"} 2.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="demo"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="demo"} 0.25
vllm:prompt_tokens_total{engine="0",model_name="demo"} 1000.0
vllm:prompt_tokens_created{engine="0",model_name="demo"} 1.796020782e+09
vllm:generation_tokens_total{engine="0",model_name="demo"} 50.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",gpu_memory_utilization="0.9",num_gpu_blocks="4096"} 1.0
"""


def test_vllms_metrics_tell_progress_and_the_cache() -> None:
    """A long prompt's steps show in the cache before its tokens do in the counters."""
    found = vllm.counters_of(VLLM_METRICS)
    assert (found.running, found.waiting, found.progress, found.counts_requests) == (2, 1, 251_050, True)
    assert vllm.counters_of(VLLM_METRICS.replace(b"0.25", b"0.2503")).progress != found.progress
    assert vllm.limits_of(VLLM_METRICS, ASSUMED).kv_tokens == 65536
    models = json.dumps({"object": "list", "data": [{"id": "demo", "max_model_len": 41776}]}).encode()
    assert vllm.length_of(models, ASSUMED).context_length_tokens == 41776
    assert vllm.length_of(b"{}", ASSUMED) == ASSUMED
    assert not vllm.counters_of(b"").counts_requests


def test_vllm_listens_on_a_socket(tmp_path: Path) -> None:
    """Of the run directory, which nobody else may enter."""
    _, spec = started(configured(tmp_path, "vllm", "0.32.0", tensor_parallel=2, kv_dtype="fp8_e4m3"), tmp_path)
    assert value(spec, "--uds") == str(tmp_path / "engine-3.sock")
    assert value(spec, "--tensor-parallel-size") == "2"
    assert spec.env["HF_HUB_OFFLINE"] == "1"


def llama(tmp_path: Path, content: bytes = b"GGUF\x03\x00\x00\x00", **keys: object) -> Config:
    """With a program and a file."""
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    table = replace(EngineTable(backend="llamacpp", program="/bin/true"), **keys)  # type: ignore[arg-type]
    return replace(Config(), model=ModelTable(str(file), "demo"), engine=table)


def test_llama_server_gets_the_file_and_the_rung(tmp_path: Path) -> None:
    """One cache for all sequences; a batch is a step."""
    backend, spec = started(llama(tmp_path, max_running=2, context_length_tokens=4096), tmp_path)
    assert value(spec, "--model") == str(tmp_path / "m.gguf")
    assert value(spec, "--host") == str(spec.endpoint.socket_path)
    assert (value(spec, "--ctx-size"), value(spec, "--parallel"), value(spec, "--batch-size")) == ("4096", "2", "256")
    assert "--kv-unified" in spec.argv
    rung = backend.first_rung(llama(tmp_path))
    assert backend.told(llama(tmp_path), rung) != backend.told(llama(tmp_path), replace(rung, max_running=1))


def pair(key: str, kind: int, value: bytes) -> bytes:
    """Of a GGUF header."""
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value


@pytest.mark.parametrize(
    ("pairs", "context"),
    [
        (
            (pair("general.architecture", 8, struct.pack("<Q", 5) + b"llama"), pair("llama.context_length", 4, struct.pack("<I", 8192))),
            8192,
        ),
        ((pair("a.flag", 7, b"\x01"), pair("a.tokens", 9, struct.pack("<IQ", 8, 0)), pair("a.context_length", 4, struct.pack("<I", 1))), 0),
        ((pair("a.name", 8, struct.pack("<Q", 2**60)),), 0),
        ((), 0),
    ],
)
def test_the_files_own_context_is_rung_zero(tmp_path: Path, pairs: tuple[bytes, ...], context: int) -> None:
    """Out of its first pairs; 0 where they do not say, and for a broken file."""
    config = llama(tmp_path, b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs)) + b"".join(pairs))
    assert backend_of(config).first_rung(config).context_length_tokens == context
    set_to = replace(config, engine=replace(config.engine, context_length_tokens=512))
    assert backend_of(set_to).first_rung(set_to).context_length_tokens == 512


def test_a_file_that_llama_cpp_cannot_take_is_named(tmp_path: Path) -> None:
    """No GGUF, several in a folder, no program."""
    with pytest.raises(ModelError, match="is no GGUF file"):
        started(llama(tmp_path, b"version https://git-lfs.github.com/spec/v1"), tmp_path)
    config = llama(tmp_path)
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="several GGUF files"):
        started(replace(config, model=ModelTable(str(tmp_path))), tmp_path)
    with pytest.raises(ConfigError, match=r"engine\.program"):
        started(llama(tmp_path, program=str(tmp_path / "nowhere")), tmp_path)


LLAMA_METRICS = b"""# HELP llamacpp:n_decode_total Total number of llama_decode() calls
# TYPE llamacpp:n_decode_total counter
llamacpp:n_decode_total 37
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 1
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 2
# TYPE llamacpp:n_busy_slots_per_decode gauge
llamacpp:n_busy_slots_per_decode 1.5
"""


def test_llama_servers_words_are_read() -> None:
    """As b10434 says them."""
    found = llamacpp.counters_of(LLAMA_METRICS)
    assert (found.progress, found.running, found.waiting, found.counts_requests) == (37, 1, 2, True)
    props = {"default_generation_settings": {"n_ctx": 4096, "params": {}}, "total_slots": 2}
    limits = llamacpp.limits_of(json.dumps(props).encode(), ASSUMED)
    assert (limits.context_length_tokens, limits.max_running, limits.kv_tokens) == (4096, 2, 4096)
