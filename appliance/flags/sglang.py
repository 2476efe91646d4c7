"""SGLang's options, read in the argument parsers of 0.5.9 to 0.5.23.

Every option that matters is said: its defaults move between versions (the chunk of a 24 GiB card doubled in 0.5.18, and with it went an
eighth of the KV cache).
"""

from __future__ import annotations

from appliance.core.plan import Rung
from appliance.core.versions import Version
from appliance.flags.vocabulary import EngineWords, Gone, OptionRules

NEWEST = (0, 5, 23)

_SPELLINGS: dict[str, tuple[tuple[Version, str], ...]] = {
    "graphs_max": (((0,), "--cuda-graph-max-bs"), ((0, 5, 14), "--cuda-graph-max-bs-decode")),
    "state_strategy": (((0,), "--mamba-scheduler-strategy"), ((0, 5, 14), "--mamba-radix-cache-strategy")),
}
"""Options that were renamed: first version → its name from there on."""
_GRAPH_BACKENDS = (0, 5, 14)
"""--cuda-graph-backend-decode and -prefill; before, --disable-cuda-graph."""
_FEATURE_TRANSPORT = (0, 5, 16)
_SNAPSHOT_INTERVAL = (0, 5, 13)

_SWITCHES = {
    "overlap_schedule": "--disable-overlap-schedule",
    "custom_all_reduce": "--disable-custom-all-reduce",
}
_KV_DTYPES = {"float16": "auto", "float32": "auto", "fp8": "fp8_e4m3"}
"""Words of ours that it has no word for → what it makes of them."""
_PREFILL_BATCH_TOKENS = 16384


def words(rung: Rung, version: Version) -> EngineWords:
    """A rung, by the names of that version."""
    off = rung.features_off
    said = [
        "--mem-fraction-static", f"{rung.mem_fraction:g}",
        "--chunked-prefill-size", str(rung.prefill_chunk_tokens),
        "--max-prefill-tokens", str(max(_PREFILL_BATCH_TOKENS, rung.prefill_chunk_tokens)),
        "--max-running-requests", str(rung.max_running),
        "--kv-cache-dtype", _KV_DTYPES.get(rung.kv_dtype, rung.kv_dtype),
        "--tp-size", str(rung.tensor_parallel),
    ]  # fmt: skip
    if rung.context_length_tokens:
        said += ["--context-length", str(rung.context_length_tokens)]
    if rung.block_tokens:
        said += ["--page-size", str(rung.block_tokens)]
    if not rung.prefix_cache:
        said.append("--disable-radix-cache")
    said += _graphs(rung, version) + _state(rung, version) + _drafter(rung)
    if rung.language_only:
        said.append("--language-only")
    elif version >= _FEATURE_TRANSPORT:
        said += ["--mm-feature-transport", "cpu"]  # else 1 GiB of the first card goes to a pool of image features
    if "attention_backend" in off:
        said += ["--attention-backend", "triton"]
    if rung.tensor_parallel > 1 and "p2p" not in off:
        said.append("--enable-p2p-check")  # consumer cards say that they can, and hang
    said += [switch for feature, switch in _SWITCHES.items() if feature in off]
    return EngineWords(tuple(said), {"NCCL_P2P_DISABLE": "1"} if "p2p" in off else {})


def has_snapshots(version: Version) -> bool:
    """Whether /v1/loads reads a snapshot, which does not ask the scheduler, and how often it is written can be said."""
    return version >= _SNAPSHOT_INTERVAL


def _spelled(option: str, version: Version) -> str:
    return next(name for since, name in reversed(_SPELLINGS[option]) if version >= since)


def _graphs(rung: Rung, version: Version) -> list[str]:
    if "cuda_graph" not in rung.features_off:
        return [_spelled("graphs_max", version), str(rung.max_running)]
    if version >= _GRAPH_BACKENDS:
        return ["--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"]
    return ["--disable-cuda-graph"]


def _state(rung: Rung, version: Version) -> list[str]:
    """Slots, dtype, and the strategy whose three slots a request the plan counts with."""
    if rung.state_slots is None:
        return []
    said = ["--max-mamba-cache-size", str(rung.state_slots), "--mamba-ssm-dtype", rung.state_dtype or "float32"]
    return said + ([_spelled("state_strategy", version), "no_buffer"] if rung.prefix_cache else [])


def _drafter(rung: Rung) -> list[str]:
    if not rung.draft_tokens or "speculative" in rung.features_off:
        return []
    steps = str(max(1, rung.draft_tokens - 1))
    said = ["--speculative-algorithm", "NEXTN", "--speculative-num-steps", steps, "--speculative-eagle-topk", "1"]
    return [*said, "--speculative-num-draft-tokens", str(rung.draft_tokens)]


_ADDRESS = "where the engine listens is between it and the gateway; set gateway.host and gateway.port"
_LOCKS_OUT = "the gateway has no such credentials and every request would be refused; keys belong into gateway.api_keys_file"
_NAMES = "set gateway.tls_certificate and gateway.tls_key; between gateway and engine there is no network"

RULES = OptionRules(
    program=("python", "-m", "sglang.launch_server"),
    newest=NEWEST,
    words=words,
    gone={
        "--disable-flashinfer": Gone((0, 4), "write --attention-backend triton"),
        "--enable-flashinfer-mla": Gone((0, 5), "write --attention-backend flashinfer"),
        "--cuda-graph-max-bs": Gone((0, 5, 20), "engine.max_running sets --cuda-graph-max-bs-decode"),
        "--mamba-scheduler-strategy": Gone((0, 5, 20), "write --mamba-radix-cache-strategy"),
    },
    ours={
        "--model-path": "set model.path",
        "--model": "set model.path",
        "--served-model-name": "set model.name",
        "--host": _ADDRESS,
        "--port": _ADDRESS,
        "--mem-fraction-static": "set budget.mem_fraction",
        "--context-length": "set engine.context_length_tokens",
        "--chunked-prefill-size": "set engine.prefill_chunk_tokens",
        "--max-running-requests": "set engine.max_running",
        "--kv-cache-dtype": "set engine.kv_dtype",
        "--tp-size": "set engine.tensor_parallel",
        "--tensor-parallel-size": "set engine.tensor_parallel",
        "--cuda-graph-max-bs-decode": "engine.max_running sets it",
        "--speculative-num-draft-tokens": "set engine.draft_tokens",
        "--max-mamba-cache-size": "set engine.state_slots",
        "--mamba-ssm-dtype": "set engine.state_dtype",
        "--language-only": "set engine.language_only",
        "--api-key": _LOCKS_OUT,
        "--admin-api-key": _LOCKS_OUT,
        "--ssl-keyfile": _NAMES,
        "--ssl-certfile": _NAMES,
    },
    dangerous={
        "--skip-server-warmup": "the engine calls itself ready before a card has computed anything",
        "--crash-dump-folder": "what clients asked in the last five minutes lies on the disk after each crash",
        "--log-requests": "what clients ask is written to the journal",
        "--trust-remote-code": "code of the model's folder runs as the engine",
        "--enable-hierarchical-cache": "illegal memory accesses that ended with it were reported (sglang#16771, #18785, #30055)",
        "--enable-memory-saver": "the memory of the plan can be taken away over HTTP",
        "--watchdog-timeout": "the appliance finds hangs itself; a short one here ends engines that compute",
        "--max-total-tokens": "the plan does not know of it; the KV cache is smaller than it says",
        "--max-prefill-tokens": "the prefill peak that the plan counts with is another",
        "--dp-size": "the plan is that of one copy of the model",
        "--pp-size": "the plan is that of one stage with all layers",
        "--nnodes": "the appliance watches the processes of this machine alone",
        "--dist-init-addr": "the nodes trust whoever reaches that port, which runs code as the engine: give it a network of its own",
    },
)  # fmt: skip
