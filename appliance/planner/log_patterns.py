"""The lines of start-up logs that carry memory figures, by engine: name of the figure, pattern, unit. Data for startup_log.

SGLang writes "GB" and means GiB (bytes ÷ 2^30). Times, ranks and container prefixes before the text do not matter: patterns are searched.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from appliance.core.units import GIB, MIB


class LinePattern(NamedTuple):
    """One figure of a line; `scale` turns it into bytes, or is 1 for counts."""

    name: str
    pattern: re.Pattern[str]
    scale: float


_NUMBER = r"(-?\d[\d,]*(?:\.\d+)?)"


def _line(name: str, pattern: str, scale: float = GIB) -> LinePattern:
    return LinePattern(name, re.compile(pattern.replace("<n>", _NUMBER)), scale)


SGLANG = (
    _line("communicator", r"Init torch distributed ends\..*?mem usage=<n> GB"),
    _line("free_at_start", r"Load weight begin\. avail mem=<n> GB"),
    _line("weights", r"Load weight end\..*?mem usage=<n> GB"),
    _line("after_weights", r"Load weight end\..*?avail mem=<n> GB"),
    _line("state_slots", r"max_mamba_cache_size: <n>", 1),
    _line("conv_state", r"Mamba Cache is allocated.*?conv_state size: <n> ?GB"),
    _line("ssm_state", r"Mamba Cache is allocated.*?\bssm_state size: <n> ?GB"),
    _line("intermediate_ssm", r"intermediate_ssm_state_cache size: <n> ?GB"),
    _line("intermediate_conv", r"intermediate_conv_window_cache size: <n> ?GB"),
    _line("kv_tokens", r"KV Cache is allocated\..*?#tokens: <n>", 1),
    _line("k_cache", r"KV Cache is allocated\..*?K size: <n> GB"),
    _line("v_cache", r"KV Cache is allocated\..*?\bV size: <n> GB"),
    _line("kv_cache", r"KV Cache is allocated\..*?KV size: <n> GB"),
    _line("sliding_cache", r"SWAKVPool mem usage: <n> GB"),
    _line("after_pools", r"Memory pool end\. avail mem=<n> GB"),
    _line("graphs", r"Capture .*?graph end\..*?mem usage=<n> GB"),
    _line("available", r"available_gpu_mem=<n> GB"),
    _line("kv_tokens", r"max_total_num_tokens=<n>", 1),
    _line("chunk", r"chunked_prefill_size=<n>", 1),
    _line("max_running", r"max_running_requests=<n>", 1),
    _line("context", r"context_len=<n>", 1),
    _line("context", r"\bcontext_length=<n>", 1),
    _line("mem_fraction", r"mem_fraction_static=<n>", 1),
    _line("mem_fraction", r"--mem-fraction-static[= ]<n>", 1),
    _line("tensor_parallel", r"\btp_size=<n>", 1),
)
"""0.5.9, 0.5.17 and 0.5.23, and the older forms without "mem usage" or "elapsed"."""

VLLM = (
    _line("total", r"Free memory on device \(-?[\d.]+/<n> GiB\)"),
    _line("free_at_start", r"Free memory on device \(<n>/[\d.]+ GiB\)"),
    _line("mem_fraction", r"Desired GPU memory utilization is \(<n>,", 1),
    _line("requested", r"Desired GPU memory utilization is \([\d.]+, <n> GiB\)"),
    _line("consumed", r"Actual usage is <n> GiB for consumed memory"),
    _line("weights", r"Actual usage is <n> GiB for weight"),
    _line("activation", r"<n> GiB for peak activation"),
    _line("non_torch", r"<n> GiB for non-torch memory"),
    _line("graphs", r"<n> GiB for CUDAGraph memory"),
    _line("kv_pool", r"Current kv cache memory in use is <n> GiB"),
    _line("weights", r"Model loading took <n> (?:GiB|GB)"),
    _line("weights", r"Loading model weights took <n> GB"),
    _line("kv_pool", r"Available KV cache memory: <n> GiB"),
    _line("kv_tokens", r"(?:GPU|CPU) KV cache size: <n> tokens", 1),
    _line("context", r"Maximum concurrency for <n> tokens per request", 1),
    _line("concurrency", r"tokens per request: <n>x", 1),
    _line("blocks", r"# (?:GPU|cuda) blocks: <n>", 1),
    _line("block_tokens", r"Setting attention block size to <n> tokens", 1),
    _line("graphs", r"CUDA graph pool memory: <n> GiB \(actual\)"),
    _line("graphs", r"Graph capturing finished in .*? took <n> GiB"),
    # The V0 engine.
    _line("total", r"total_gpu_memory(?:=| \(|\s+)<n> ?GiB"),
    _line("mem_fraction", r"gpu_memory_utilization(?:=| \(|\s+|': )<n>", 1),
    _line("weights", r"model weights take\s+<n> ?GiB"),
    _line("non_torch", r"non_torch_memory(?: takes|=|\s)\s*<n> ?GiB"),
    _line("peak_torch", r"peak_torch_memory=<n>GiB"),
    _line("activation", r"PyTorch activation peak memory(?: takes)?\s+<n> ?GiB"),
    _line("kv_pool", r"reserved for KV Cache is <n> ?GiB"),
    _line("kv_pool", r"(?:kv_cache_size=|available_kv_cache_memory\s+)<n> ?GiB"),
    # Refusals.
    _line("kv_needed", r"\(?<n> GiB KV cache is needed"),
    _line("kv_pool", r"available KV cache memory \(<n> GiB\)"),
    _line("estimated_context", r"estimated maximum model length is <n>", 1),
    _line("context", r"max seq len \(<n>\)", 1),
    # How it was started.
    _line("context", r"'?max_(?:model|seq)_len'?[=:] ?<n>", 1),
    _line("tensor_parallel", r"'?tensor_parallel_size'?[=:] ?<n>", 1),
    _line("max_running", r"'?max_num_seqs'?[=:] ?<n>", 1),
    _line("chunk", r"'?max_num_batched_tokens'?[=:] ?<n>", 1),
    _line("draft_tokens", r"num_(?:speculative|spec)_tokens'?\"?[=:] ?<n>", 1),
)
"""0.6 to 0.33; of a figure that is printed twice the later one counts."""

LLAMACPP = (
    _line("total", r"(?:Total VRAM:|VRAM:) <n> MiB", MIB),
    _line("free_before", r"using device CUDA\d+ .*? - <n> MiB free", MIB),
    _line("weights", r"(?:CUDA|ROCm|Vulkan)\d+ (?:model )?buffer size = +<n> MiB", MIB),
    _line("host_weights", r"(?:CPU|CPU_Mapped|CUDA_Host) (?:model )?buffer size = +<n> MiB", MIB),
    _line("kv_pool", r"(?:CUDA|ROCm|Vulkan)\d+ KV buffer size = +<n> MiB", MIB),
    _line("linear_state", r"(?:CUDA|ROCm|Vulkan)\d+ RS buffer size = +<n> MiB", MIB),
    _line("compute", r"(?:CUDA|ROCm|Vulkan)\d+ compute buffer size (?:is|=) +<n> MiB", MIB),
    _line("host_kv_pool", r"\bCPU KV buffer size = +<n> MiB", MIB),
    _line("host_state", r"\bCPU RS buffer size = +<n> MiB", MIB),
    _line("host_compute", r"\bCPU compute buffer size (?:is|=) +<n> MiB", MIB),
    _line("context", r"\bn_ctx += <n>", 1),
    _line("chunk", r"\bn_ubatch += <n>", 1),
    _line("max_running", r"\bn_seq_max += <n>", 1),
)
"""Old ("llm_load_tensors:", "llama_kv_cache_init:") and new ("load_tensors:", "llama_kv_cache:") prefixes."""

NATIVE = (
    _line("weights", r"Load weight end\. bytes=<n>", 1),
    _line("kv_pool", r"KV cache is allocated\. bytes=<n>", 1),
    _line("context", r"The engine is ready\..*? context_length_tokens=<n>", 1),
    _line("max_running", r"The engine is ready\..*? max_running=<n>", 1),
    _line("kv_tokens", r"The engine is ready\..*? kv_tokens=<n>", 1),
)
"""The built-in engine's. Free memory it does not look at, that is the supervisor's to measure; version and dtype are ours."""

SUMMED = frozenset(
    {"sglang.weights", "sglang.graphs", "llamacpp.weights", "llamacpp.kv_pool", "llamacpp.linear_state", "llamacpp.host_weights"}
)
"""Figures that come in parts: a model and its drafter, several graphs, several buffers."""

ENGINE_MARKS = (
    ("llamacpp", re.compile(r"llama_(?:kv_cache|context|model|new_context)|llm_load|load_tensors:|ggml_cuda_init|llama-server")),
    (
        "vllm",
        re.compile(
            r"vllm|VLLM|(?:worker|model_runner|kv_cache_utils|gpu_executor|core)\.py:\d+\]|GPU KV cache size|KV cache is needed"
            r"|Memory profiling results|# GPU blocks"
        ),
    ),
    ("native", re.compile(r"(?:The engine is ready|Load weight begin)\. model=|(?:KV cache is allocated|Load weight end)\. bytes=")),
    (
        "sglang",
        re.compile(r"Load weight .*avail mem|Memory pool end|KV Cache is allocated|max_total_num_tokens|mem_fraction_static|sglang"),
    ),
)
"""Whose log it is; the engine with the most lines."""

VERSIONS = {
    "vllm": re.compile(r"(?:vLLM API server version |LLM engine \()v?(\d+\.\d+(?:\.\d+)?)"),
    "sglang": re.compile(r"sglang[=\s_-]+(?:version[=:\s]+)?v?(\d+\.\d+\.\d+)"),
    "llamacpp": re.compile(r"build:? (?:= )?(\d+)"),
}
KV_DTYPES = {
    "sglang": re.compile(r"(?:Using KV cache dtype: |KV Cache is allocated\. dtype: |kv_cache_dtype=')(?:torch\.)?(\w+)"),
    "vllm": re.compile(r"'?kv_cache_dtype'?[=:] ?'?(\w+)"),
    "llamacpp": re.compile(r"K \((\w+)\): "),
}
