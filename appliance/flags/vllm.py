"""vLLM's options, read in the argument parsers of 0.10.2 to 0.33.0."""

from __future__ import annotations

import json

from appliance.core.plan import Rung
from appliance.core.versions import Version
from appliance.flags.vocabulary import EngineWords, Gone, OptionRules

NEWEST = (0, 33, 0)
_ATTENTION_OPTION = (0, 13)
"""--attention-backend; before, the variable VLLM_ATTENTION_BACKEND."""
_AUTO_LENGTH = (0, 14)
"""--max-model-len auto: as much as fits."""
_LANGUAGE_ONLY = (0, 20)
_STATE_DTYPES = (0, 20)
"""Before, the linear state could be float32 or what the model says, and the KV cache 8 bits wide or what the model says."""
_TRITON_V1 = (0, 12)
"""Before, Triton's backend was called TRITON_ATTN_VLLM_V1."""

_SWITCHES = {
    "cuda_graph": "--enforce-eager",
    "custom_all_reduce": "--disable-custom-all-reduce",
    "overlap_schedule": "--no-async-scheduling",
}
_KV_DTYPES = {"float32": "auto"}


def words(rung: Rung, version: Version) -> EngineWords:
    """A rung, by the names of that version."""
    said = [
        "--gpu-memory-utilization", f"{rung.mem_fraction:g}",
        "--max-num-batched-tokens", str(rung.prefill_chunk_tokens),
        "--max-num-seqs", str(rung.max_running),
        "--kv-cache-dtype", _kv_dtype(rung.kv_dtype, version),
        "--tensor-parallel-size", str(rung.tensor_parallel),
        "--enable-chunked-prefill",
        "--enable-prefix-caching" if rung.prefix_cache else "--no-enable-prefix-caching",
    ]  # fmt: skip
    if rung.context_length_tokens or version >= _AUTO_LENGTH:
        said += ["--max-model-len", str(rung.context_length_tokens or "auto")]
    if rung.state_dtype and (rung.state_dtype == "float32" or version >= _STATE_DTYPES):
        said += ["--mamba-ssm-cache-dtype", rung.state_dtype]
    if rung.block_tokens:
        said += ["--block-size", str(rung.block_tokens)]
    if rung.language_only:
        nothing = json.dumps({"image": 0, "video": 0}, separators=(",", ":"))
        said += ["--language-model-only"] if version >= _LANGUAGE_ONLY else ["--limit-mm-per-prompt", nothing]
    if rung.draft_tokens and "speculative" not in rung.features_off:
        said += ["--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": rung.draft_tokens}, separators=(",", ":"))]
    said += [switch for feature, switch in _SWITCHES.items() if feature in rung.features_off]
    environment = _between_cards(rung)
    if "attention_backend" in rung.features_off:
        backend = "TRITON_ATTN" if version >= _TRITON_V1 else "TRITON_ATTN_VLLM_V1"
        if version >= _ATTENTION_OPTION:
            said += ["--attention-backend", backend]
        else:
            environment["VLLM_ATTENTION_BACKEND"] = backend
    return EngineWords(tuple(said), environment)


def _between_cards(rung: Rung) -> dict[str, str]:
    """By itself it takes the driver's word that cards can read each other's memory; consumer cards say that they can, and hang."""
    if "p2p" in rung.features_off:
        return {"NCCL_P2P_DISABLE": "1"}
    return {"VLLM_SKIP_P2P_CHECK": "0"} if rung.tensor_parallel > 1 else {}


def _kv_dtype(word: str, version: Version) -> str:
    if word in ("bfloat16", "float16") and version < _STATE_DTYPES:
        return "auto"
    return _KV_DTYPES.get(word, word)


_ADDRESS = "where the engine listens is between it and the gateway; set gateway.host and gateway.port"
_LOCKS_OUT = "the gateway has no such credentials and every request would be refused; keys belong into gateway.api_keys_file"
_NAMES = "set gateway.tls_certificate and gateway.tls_key; between gateway and engine there is no network"

RULES = OptionRules(
    program=("vllm", "serve"),
    newest=NEWEST,
    words=words,
    gone={
        "--disable-log-requests": Gone((0, 20), "leave it out: requests are not logged unless --enable-log-requests is given", (0, 33)),
        "--num-scheduler-steps": Gone((0, 10), "leave it out: the V1 engine has no such steps"),
        "--use-v2-block-manager": Gone((0, 10), "leave it out: there is no other"),
        "--swap-space": Gone((0, 20), "leave it out: the V1 engine recomputes what it sets back"),
        "--guided-decoding-backend": Gone((0, 12), "write --structured-outputs-config.backend"),
        "--worker-use-ray": Gone((0, 10), "write --distributed-executor-backend ray"),
        "--device": Gone((0, 10), "leave it out: the installed wheel decides"),
    },
    ours={
        "--model": "set model.path",
        "--served-model-name": "set model.name",
        "--uds": _ADDRESS,
        "--host": _ADDRESS,
        "--port": _ADDRESS,
        "--gpu-memory-utilization": "set budget.mem_fraction",
        "--max-model-len": "set engine.context_length_tokens",
        "--max-num-batched-tokens": "set engine.prefill_chunk_tokens",
        "--max-num-seqs": "set engine.max_running",
        "--kv-cache-dtype": "set engine.kv_dtype",
        "--tensor-parallel-size": "set engine.tensor_parallel",
        "-tp": "set engine.tensor_parallel",
        "--speculative-config": "set engine.draft_tokens",
        "--mamba-ssm-cache-dtype": "set engine.state_dtype",
        "--language-model-only": "set engine.language_only",
        "--api-key": _LOCKS_OUT,
        "--ssl-keyfile": _NAMES,
        "--ssl-certfile": _NAMES,
        "--headless": "there would be no HTTP server to give requests to",
        "--root-path": "the gateway asks for the usual paths",
    },
    dangerous={
        "--enable-log-requests": "what clients ask is written to the journal",
        "--trust-remote-code": "code of the model's folder runs as the engine",
        "--kv-cache-memory-bytes": "the plan does not know of it, and --gpu-memory-utilization no longer counts",
        "--data-parallel-size": "the plan is that of one copy of the model",
        "--pipeline-parallel-size": "the plan is that of one stage with all layers",
        "--nnodes": "the appliance watches the processes of this machine alone",
        "--master-addr": "the nodes trust whoever reaches that port, which runs code as the engine: give it a network of its own",
        "--data-parallel-address": "the nodes trust whoever reaches that port, which runs code as the engine: give it a network of its own",
        "--enable-sleep-mode": "the memory of the plan can be taken away over HTTP",
        "--disable-log-stats": "the engine's counters are gone, and hangs are found by silence alone",
        "--cpu-offload-gb": "the plan does not know of it; weights come over the bus at each step",
        "--max-num-partial-prefills": "the prefill peak that the plan counts with is another",
    },
)  # fmt: skip
