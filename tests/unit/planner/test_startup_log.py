"""Start-up logs of three engines, in the words of several of their versions."""

import pytest

from appliance.core.units import GIB, MIB
from appliance.planner.compare import compare
from appliance.planner.startup_log import as_started, measured_terms, read_startup_log
from tests.unit.planner import shapes

SGLANG_0517 = """\
[2026-08-16 09:00:00] server_args=ServerArgs(model_path='/models/m', mem_fraction_static=0.95, context_length=119808, tp_size=1)
[2026-08-16 09:00:05] Init torch distributed ends. elapsed=0.52 s, mem usage=0.10 GB
[2026-08-16 09:00:06] Load weight begin. avail mem=23.23 GB
[2026-08-16 09:00:37] Load weight end. elapsed=31.20 s, type=Qwen3_5ForConditionalGeneration, quant=x, \
avail mem=5.56 GB, mem usage=17.67 GB.
[2026-08-16 09:00:38] Mamba Cache is allocated. max_mamba_cache_size: 9, conv_state size: 0.03GB, ssm_state size: 0.70GB
[2026-08-16 09:00:38] KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: 120079, K size: 1.83 GB, V size: 1.83 GB
[2026-08-16 09:00:38] Memory pool end. avail mem=1.16 GB
[2026-08-16 09:00:39] Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1, bs=[1, 2, 4], avail mem=0.78 GB
[2026-08-16 09:00:42] Capture target decode CUDA graph end. elapsed=3.10 s, mem usage=0.12 GB, avail mem=0.66 GB.
[2026-08-16 09:00:44] max_total_num_tokens=120079, chunked_prefill_size=2048, max_prefill_tokens=16384, max_running_requests=3, \
context_len=119808, available_gpu_mem=0.65 GB
[2026-08-16 09:00:45] The server is fired up and ready to roll!
"""
SGLANG_059 = """\
[2026-02-01 00:05:01 TP0] Load weight begin. avail mem=15.24 GB
[2026-02-01 00:05:03 TP0] Load weight end. elapsed=1.25 s, type=GraniteMoeHybridForCausalLM, dtype=torch.bfloat16, \
avail mem=9.26 GB, mem usage=5.98 GB.
[2026-02-01 00:05:03 TP1] Load weight end. elapsed=1.25 s, type=GraniteMoeHybridForCausalLM, dtype=torch.bfloat16, \
avail mem=9.20 GB, mem usage=6.04 GB.
[2026-02-01 00:05:03 TP0] Using KV cache dtype: torch.bfloat16
[2026-02-01 00:05:03 TP0] Mamba Cache is allocated. max_mamba_cache_size: 38, conv_state size: 0.03GB, ssm_state size: 2.74GB
[2026-02-01 00:05:03 TP0] KV Cache is allocated. #tokens: 399740, K size: 1.52 GB, V size: 1.52 GB
[2026-02-01 00:05:03 TP0] Memory pool end. avail mem=3.42 GB
[2026-02-01 00:05:04 TP0] Capture cuda graph end. Time elapsed: 1.24 s. mem usage=0.09 GB. avail mem=2.89 GB.
max_total_num_tokens=399740
"""
SGLANG_OLD = """\
2025-02-04 21:20:16 [2025-02-04 05:20:16 TP0] Load weight begin. avail mem=22.80 GB
2025-02-04 21:29:17 [2025-02-04 05:29:17 TP0] Load weight end. type=Qwen2ForCausalLM, dtype=torch.bfloat16, avail mem=8.37 GB
2025-02-04 21:29:17 [2025-02-04 05:29:17 TP0] KV Cache is allocated. K size: 2.82 GB, V size: 2.82 GB.
2025-02-04 21:29:17 [2025-02-04 05:29:17 TP0] Memory pool end. avail mem=1.68 GB
2025-02-04 21:29:20 [2025-02-04 05:29:20 TP0] max_total_num_tokens=105531, chunked_prefill_size=2048, max_prefill_tokens=16384, \
max_running_requests=2049, context_len=131072
"""
SGLANG_DRAFT = """\
[2026-09-11 23:34:13 TP0 EP0] Load weight begin. avail mem=111.47 GB
[2026-09-11 23:43:15 TP0 EP0] Load weight end. elapsed=541.76 s, type=DeepseekV4ForCausalLM, quant=fp8, \
avail mem=17.47 GB, mem usage=94.00 GB.
[2026-09-11 23:44:38 TP0 EP0] Load weight begin. avail mem=17.54 GB
[2026-09-11 23:45:53 TP0 EP0] Load weight end. elapsed=74.58 s, type=DeepseekV4ForCausalLMDSpark, quant=fp8, avail mem=14.74 GB, \
mem usage=2.80 GB.
[2026-09-11 23:46:13 TP0 EP0] Memory pool end. avail mem=9.90 GB
[2026-09-11 23:46:44 TP0 EP0] Capture target verify CUDA graph end. elapsed=13.48 s, mem usage=0.58 GB, avail mem=7.62 GB.
[2026-09-11 23:46:49 TP0 EP0] Capture draft verify CUDA graph end. elapsed=4.26 s, mem usage=-0.01 GB, avail mem=7.68 GB.
"""
VLLM_ONE_LINE = (
    "(Worker_TP0 pid=1) INFO 09-01 10:00:00 [gpu_worker.py:804] Free memory on device (30.27/31.4 GiB) on startup. "
    "Desired GPU memory utilization is (0.92, 28.88 GiB). Actual usage is 15.03 GiB for consumed memory (weights + non-torch), 1.59 GiB "
    "for peak activation, and 0.09 GiB for CUDAGraph memory. Replace gpu_memory_utilization config with `--kv-cache-memory=12917635953` "
    "(12.03 GiB) to fit into requested memory, or `--kv-cache-memory=14405811712` (13.42 GiB) to fully utilize gpu memory. "
    "Current kv cache memory in use is 12.26 GiB.\n"
)
VLLM_NEW = """\
(EngineCore pid=229) INFO 09-01 10:00:00 [core.py:93] Initializing a V1 LLM engine (v0.24.0) with config: model='m', max_seq_len=262144, \
tensor_parallel_size=2, kv_cache_dtype=fp8,
(Worker_TP0 pid=300) INFO 09-01 10:00:30 [gpu_model_runner.py:5233] Model loading took 8.8 GiB memory and 30.1 seconds
(Worker_TP1 pid=301) INFO 09-01 10:00:30 [gpu_model_runner.py:5233] Model loading took 8.9 GiB memory and 30.1 seconds
(Worker_TP0 pid=300) INFO 09-01 10:00:50 [gpu_worker.py:462] Available KV cache memory: 11.05 GiB
(EngineCore pid=229) INFO 09-01 10:00:50 [kv_cache_utils.py:1708] GPU KV cache size: 623,873 tokens
(EngineCore pid=229) INFO 09-01 10:00:50 [kv_cache_utils.py:1713] Maximum concurrency for 262,144 tokens per request: 2.38x
"""
VLLM_V0 = """\
INFO 11-21 12:00:00 worker.py:243] Memory profiling results: total_gpu_memory=23.58GiB initial_memory_usage=15.38GiB \
peak_torch_memory=17.06GiB memory_usage_post_profile=15.44GiB non_torch_memory=0.36GiB kv_cache_size=3.81GiB gpu_memory_utilization=0.90
INFO 11-21 12:00:01 model_runner.py:1077] Loading model weights took 14.9888 GB
INFO 11-21 12:00:02 distributed_gpu_executor.py:57] # GPU blocks: 1952, # CPU blocks: 2048
INFO 11-21 12:00:02 gpu_executor.py:83] Maximum concurrency for 20000 tokens per request: 1.56x
"""
VLLM_REFUSED = (
    "(EngineCore pid=77) ValueError: To serve at least one request with the model's max seq len (65536), 4.76 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (1.56 GiB). "
    "Based on the available memory, the estimated maximum model length is 15984.\n"
)
LLAMA_NEW = """\
ggml_cuda_init: found 1 CUDA devices (Total VRAM: 24126 MiB):
llama_model_load_from_file_impl: using device CUDA0 (NVIDIA GeForce RTX 3090) (0000:01:00.0) - 23871 MiB free
load_tensors:   CPU_Mapped model buffer size =   682.03 MiB
load_tensors:        CUDA0 model buffer size = 13588.48 MiB
llama_context: n_seq_max             = 1
llama_context: n_ctx                 = 215040
llama_context: n_ubatch              = 512
llama_kv_cache:      CUDA0 KV buffer size =  7140.00 MiB
llama_kv_cache: size = 7140.00 MiB (215040 cells,  16 layers,  1/1 seqs), K (q8_0): 3570.00 MiB, V (q8_0): 3570.00 MiB
llama_memory_recurrent:      CUDA0 RS buffer size =   149.62 MiB
llama_context:      CUDA0 compute buffer size =   495.00 MiB
"""
LLAMA_OLD = """\
llm_load_tensors:        CPU buffer size =   315.30 MiB
llm_load_tensors:      CUDA0 buffer size = 17787.00 MiB
llama_new_context_with_model: n_ctx      = 32768
llama_kv_cache_init:      CUDA0 KV buffer size =   816.00 MiB
llama_kv_cache_init:      CUDA1 KV buffer size =   782.00 MiB
llama_new_context_with_model:      CUDA0 compute buffer size =   672.01 MiB
"""


def _gib(size_bytes: int | None) -> float | None:
    return None if size_bytes is None else round(size_bytes / GIB, 4)


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        (SGLANG_0517, {"free": 23.23, "weights": 17.67, "state": 0.73, "fixed": 0.51, "pool": 3.66}),
        (SGLANG_059, {"free": 15.24, "weights": 5.98, "state": 2.77, "pool": 3.04}),
        (SGLANG_OLD, {"free": 22.80, "weights": 14.43, "pool": 5.64}),
        (SGLANG_DRAFT, {"free": 111.47, "weights": 96.80}),
        (VLLM_ONE_LINE, {"free": 30.27, "peak": 1.59, "fixed": 0.09, "pool": 12.26}),
        (VLLM_NEW, {"weights": 8.8, "pool": 11.05}),
        (VLLM_V0, {"weights": 14.9888, "other": 0.36, "peak": 2.0712, "pool": 3.81}),
        (VLLM_REFUSED, {"pool": 1.56}),
    ],
    ids=["sglang 0.5.17", "sglang 0.5.9", "sglang 2025", "sglang drafting", "vllm one line", "vllm 0.24", "vllm 0.6", "vllm refused"],
)
def test_terms_are_read_out_of_each_engines_own_words(text: str, terms: dict[str, float]) -> None:
    """GiB, of the first rank; what is not printed is None."""
    measured = measured_terms(read_startup_log(text))
    read = {
        "free": measured.free_at_start_bytes, "weights": measured.weight_bytes, "state": measured.linear_state_bytes,
        "fixed": measured.fixed_bytes, "peak": measured.activation_peak_bytes, "pool": measured.kv_pool_bytes,
        "other": measured.non_torch_bytes,
    }  # fmt: skip
    for name, size in read.items():
        assert _gib(size) == pytest.approx(terms[name], abs=0.002) if name in terms else size is None, name
    assert measured.source.startswith("lines ")


def test_vllms_one_line_closes_on_itself() -> None:
    """requested − consumed − peak = cache: 28.88 − 15.03 − 1.59 = 12.26."""
    log = read_startup_log(VLLM_ONE_LINE)
    figures = {name: figure.value / GIB for name, figure in log.figures.items()}
    assert figures["requested"] - figures["consumed"] - figures["activation"] == pytest.approx(figures["kv_pool"], abs=0.011)
    assert log.fraction() == 0.92


@pytest.mark.parametrize(
    ("text", "engine", "version", "dtype"),
    [
        (SGLANG_0517, "sglang", "", "fp8_e4m3"),
        (SGLANG_059, "sglang", "", "bfloat16"),
        (VLLM_NEW, "vllm", "0.24.0", "fp8"),
        (LLAMA_NEW, "llamacpp", "", "q8_0"),
        (LLAMA_OLD, "llamacpp", "", ""),
    ],
)
def test_the_log_tells_whose_it_is(text: str, engine: str, version: str, dtype: str) -> None:
    """Engine, version and KV dtype, where they are printed."""
    log = read_startup_log(text)
    assert (log.engine, log.version, log.kv_dtype) == (engine, version, dtype)


def test_llama_cpps_buffers_are_those_of_the_first_card() -> None:
    """Old and new prefixes; host buffers are not the card's."""
    new, old = measured_terms(read_startup_log(LLAMA_NEW)), measured_terms(read_startup_log(LLAMA_OLD))
    assert new.weight_bytes == round(13588.48 * MIB)
    assert new.kv_pool_bytes == 7140 * MIB
    assert new.linear_state_bytes == round(149.62 * MIB)
    assert old.weight_bytes == 17787 * MIB
    assert old.kv_pool_bytes == 816 * MIB


def test_wrappings_do_not_matter() -> None:
    """Colours, container prefixes and journal prefixes around the same lines."""
    wrapped = "\n".join(f"Aug 16 box engine[7]: \x1b[32m{line}\x1b[0m" for line in SGLANG_0517.splitlines())
    assert measured_terms(read_startup_log(wrapped)) == measured_terms(read_startup_log(SGLANG_0517))


@pytest.mark.parametrize("text", ["", "hello\nworld\n", "INFO: Application startup complete.\n" * 5, "\x00\xff\n"])
def test_other_text_has_no_figures(text: str) -> None:
    """And no error."""
    assert read_startup_log(text).figures == {}


def test_the_articles_start_is_compared_term_by_term() -> None:
    """What the plan would have said against what was printed: each within 5 %; given the terms, tokens within 0.5 %."""
    asked = shapes.inputs(shapes.facts(shapes.hybrid_27b()), "rtx3090", "sglang", engine_version="0.5.17")
    rows = {row.name: row for row in compare(asked, read_startup_log(SGLANG_0517))}
    assert set(rows) >= {"free at start", "weights", "linear state", "workspaces and graphs", "KV pool", "KV tokens"}
    assert all(abs(row.off) < 0.05 for row in rows.values())
    assert abs(rows["KV tokens, given the measured terms"].off) < 0.005


def test_vllms_start_is_planned_again_from_its_log() -> None:
    """The printed tokens from the printed memory."""
    asked = shapes.inputs(shapes.facts(shapes.hybrid_27b()), "rtx3090", "vllm", draft_tokens=3)
    started = as_started(asked, read_startup_log(VLLM_NEW))
    assert (started.tensor_parallel, started.kv_dtype, started.context_length_tokens) == (2, "fp8", 262_144)
    assert shapes.plan_of(started, 0.92).kv_tokens == pytest.approx(623_873, rel=0.005)


def test_a_given_term_wins_over_the_log() -> None:
    """A person may know better."""
    asked = shapes.inputs(shapes.facts(shapes.hybrid_27b()), "rtx3090", "sglang", measured={"weight": 17.0})
    assert as_started(asked, read_startup_log(SGLANG_0517)).measured.weight_bytes == 17 * GIB


def test_the_cards_size_in_the_log_wins_over_the_named_one() -> None:
    """vLLM prints what CUDA shows."""
    asked = shapes.inputs(shapes.facts(shapes.dense()), "24GiB", "vllm")
    assert as_started(asked, read_startup_log(VLLM_V0)).gpu.total_bytes == round(23.58 * GIB)


LLAMA_ON_THE_CPU = """0.00.016.431 I cmn  common_param: common_params_print_info: build 10434 (7e4c0a9) with GNU 11.4.0 for Linux x86_64
0.00.285.433 I load_tensors:   CPU_Mapped model buffer size =    92.10 MiB
0.00.286.794 I llama_context: n_ctx                 = 8192
0.00.287.602 I llama_context:        CPU  output buffer size =     1.50 MiB
0.00.287.747 I llama_kv_cache:        CPU KV buffer size =   180.00 MiB
0.00.534.358 I llama_kv_cache: size =  180.00 MiB (  8192 cells,  30 layers,  8/1 seqs), K (f16):   90.00 MiB, V (f16):   90.00 MiB
0.00.554.716 I sched_reserve:        CPU compute buffer size =    21.51 MiB
"""
"""Printed by llama-server b10434 at --verbosity 4 with SmolLM2-135M-Instruct Q4_1 on a machine without a card."""


def test_llama_cpp_on_the_cpu_tells_its_terms_too() -> None:
    """Where no card has a part of the model, the machine's memory is meant."""
    log = read_startup_log(LLAMA_ON_THE_CPU)
    terms = measured_terms(log)
    assert (log.engine, log.version, log.kv_dtype) == ("llamacpp", "10434", "f16")
    assert (terms.weight_bytes, terms.kv_pool_bytes, terms.activation_peak_bytes) == (96_573_850, 188_743_680, 22_554_870)
    both = LLAMA_ON_THE_CPU + "load_tensors:      CUDA0 model buffer size =  4155.99 MiB\n"
    assert measured_terms(read_startup_log(both)).weight_bytes == round(4155.99 * 2**20)


NATIVE = """\
[2026-11-30 06:34:52] INFO Listening on unix:/run/x/engine-1.sock.
[2026-11-30 06:34:55] INFO Load weight begin. model=/models/SmolLM2-135M-Instruct
[2026-11-30 06:34:55] INFO Load weight end. bytes=538060032 elapsed=0.00 s
[2026-11-30 06:34:55] INFO KV cache is allocated. bytes=536870912 prompt_tokens=6976 answer_tokens=4656 block_tokens=16
[2026-11-30 06:34:55] INFO The engine is ready. model=SmolLM2-135M-Instruct context_length_tokens=8192 max_running=8 kv_tokens=11632 \
elapsed=3.15 s
"""


def test_the_built_in_engines_own_lines() -> None:
    """They begin as SGLang's do, and are told from them; weights, pool and setting are compared with the plan's."""
    log = read_startup_log(NATIVE)
    assert log.engine == "native"
    assert (measured_terms(log).weight_bytes, measured_terms(log).kv_pool_bytes) == (538_060_032, 512 * MIB)
    model = shapes.facts(shapes.dense(hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
                                      num_key_value_heads=3, head_dim=64, vocab_size=49152, max_position_embeddings=8192,
                                      tie_word_embeddings=True))  # fmt: skip
    asked = shapes.inputs(model, "23.56GiB", "native", weights_dtype="float32")
    off = {row.name: row.off for row in compare(asked, log)}
    assert abs(off["weights"]) < 0.002
    assert off["KV tokens, given the measured terms"] == 0.0
    assert as_started(asked, log).context_length_tokens == 8192


VLLM_ON_THE_CPU = """(APIServer pid=1685) INFO 11-30 07:32:49 [scheduler.py:307] Chunked prefill is enabled with max_num_batched_tokens=512.
(EngineCore pid=2786) INFO 11-30 07:33:41 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='m', max_seq_len=2048, x
(Worker pid=3052) INFO 11-30 07:34:12 [cpu_worker.py:260] Explicitly set (1.0/23.54) GiB for KV cache on node 0.
(EngineCore pid=2786) INFO 11-30 07:34:12 [kv_cache_utils.py:2327] CPU KV cache size: 46,592 tokens, Maximum concurrency for 2,048 tokens \
per request: 22.75x
"""
"""Printed by vLLM 0.32.0, built for CPUs."""


def test_vllm_on_the_cpu_is_read_as_on_a_card() -> None:
    """It calls its cache another name."""
    log = read_startup_log(VLLM_ON_THE_CPU)
    assert (log.engine, log.version) == ("vllm", "0.32.0")
    assert (log.size("kv_tokens"), log.size("context"), log.size("chunk"), log.size("concurrency")) == (46_592, 2048, 512, 23)
