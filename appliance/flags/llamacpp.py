"""llama-server's options, read in b10434 and b11434.

-c is the whole KV cache. With one cache for all sequences (--kv-unified) each may be as long as that, as long as all of them fit together.
"""

from __future__ import annotations

from appliance.core.plan import Rung
from appliance.core.versions import Version
from appliance.flags.vocabulary import EngineWords, Gone, OptionRules

NEWEST = (11434,)
_KV_DTYPES = {"auto": "f16", "bfloat16": "bf16", "float16": "f16", "float32": "f32"}
_KV_DTYPES |= dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2"), "q8_0")
"""There is no 8-bit float: q8_0 is the nearest."""


def words(rung: Rung, version: Version) -> EngineWords:  # noqa: ARG001 - every engine's signature; these were always spelled so
    """A batch is a step: then the engine's counters tell every step, and another request waits for no more than one."""
    off = rung.features_off
    kv_dtype = _KV_DTYPES.get(rung.kv_dtype, rung.kv_dtype)
    chunk = str(rung.prefill_chunk_tokens)
    said = [
        "--ctx-size", str(rung.context_length_tokens),
        "--batch-size", chunk,
        "--ubatch-size", chunk,
        "--parallel", str(rung.max_running),
        "--cache-type-k", kv_dtype,
        "--cache-type-v", kv_dtype,
        "--flash-attn", "off" if "attention_backend" in off else "on",
        "--n-gpu-layers", "999",
        "--fit", "off",
    ]  # fmt: skip
    if rung.max_running > 1:
        said.append("--kv-unified")
    if rung.tensor_parallel > 1:
        said += ["--split-mode", "layer", "--tensor-split", ",".join(["1"] * rung.tensor_parallel)]
    return EngineWords(tuple(said), {"GGML_CUDA_DISABLE_GRAPHS": "1"} if "cuda_graph" in off else {})


_ADDRESS = "where the engine listens is between it and the gateway; set gateway.host and gateway.port"
_LOCKS_OUT = "the gateway has no such credentials and every request would be refused; keys belong into gateway.api_keys_file"
_NAMES = "set gateway.tls_certificate and gateway.tls_key; between gateway and engine there is no network"

_OURS = {
    ("--model", "-m", "--model-url", "-mu", "--hf-repo", "-hf"): "set model.path",
    ("--alias", "-a"): "set model.name",
    ("--host", "--port", "--api-prefix"): _ADDRESS,
    ("--ctx-size", "-c"): "set engine.context_length_tokens",
    ("--batch-size", "-b", "--ubatch-size", "-ub"): "set engine.prefill_chunk_tokens",
    ("--parallel", "-np"): "set engine.max_running",
    ("--cache-type-k", "-ctk", "--cache-type-v", "-ctv"): "set engine.kv_dtype",
    ("--threads", "-t"): "set engine.threads",
    ("--fit", "-fit"): "what was planned is to be what runs",
    ("--api-key", "--api-key-file"): _LOCKS_OUT,
    ("--ssl-key-file", "--ssl-cert-file"): _NAMES,
    ("--no-slots", "--no-metrics"): "hangs are found by them",
}

RULES = OptionRules(
    program=("llama-server",),
    newest=NEWEST,
    words=words,
    gone={
        "--defrag-thold": Gone((6000,), "leave it out: the cache is not cut into pieces any more"),
    },
    ours={option: why for options, why in _OURS.items() for option in options},
    dangerous={
        "--slot-save-path": "what clients asked can be written to the disk over HTTP",
        "--log-prompts-dir": "what clients ask is written to the disk",
        "--verbose": "what clients ask is written to the journal",
        "-v": "what clients ask is written to the journal",
        "--tools": "whoever may ask the model may have programs run on this machine",
        "--agent": "whoever may ask the model may have programs run on this machine",
        "-ag": "whoever may ask the model may have programs run on this machine",
        "--props": "settings of the running engine can be changed over HTTP",
        "--mlock": "the weights cannot be given back: under a memory limit the kernel ends the engine instead",
        "--cache-ram": "the plan does not know of this memory of the machine",
        "--context-shift": "answers longer than the context go on having forgotten their beginning",
    },
    abbreviates=False,
)  # fmt: skip
