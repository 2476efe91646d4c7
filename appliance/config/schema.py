"""Every key: its table, type, default, limits and meaning. The only place, with client_tables.py, where a key is declared."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from appliance.config.client_tables import AdmissionTable, FallbackTable, GatewayTable, MetricsTable, ResumeTable
from appliance.config.keys import key


@dataclass(frozen=True, slots=True)
class ModelTable:
    """[model] what is served."""

    path: str = key("", "Folder with config.json, *.safetensors and tokenizer.json.")
    name: str = key("", "The id that clients use; empty: the folder's name.")


@dataclass(frozen=True, slots=True)
class EngineTable:
    """[engine] what serves it."""

    backend: str = key(
        "native",
        "Which engine runs the model (docs/engines.md): native is the built-in one; sglang and vllm run in the environment of "
        "engine.python; llamacpp is engine.program; custom is the one that engine.command starts.",
        choices=("native", "sglang", "vllm", "llamacpp", "custom"),
    )
    command: tuple[str, ...] = key(
        (),
        "Argument list of your own engine (backend custom). It must answer GET /health and an OpenAI completion on {socket}, a unix "
        "socket, or on {port} of 127.0.0.1: one of the two words must be in the list. {model} becomes model.path; {context_length}, "
        "{prefill_chunk} and {max_running} become the rung's.",
    )
    python: str = key(
        "",
        "Python interpreter of the engine's environment; empty: that of the runtime in force (`appliancectl runtime list`), else the one "
        "that runs applianced.",
    )
    program: str = key("", "Path of llama-server (backend llamacpp); empty: that of the runtime in force, else the one in PATH.")
    version: str = key(
        "",
        "Version of SGLang, vLLM or llama.cpp whose options are used, such as 0.5.17; empty: the one that is installed, else the newest "
        "that we know.",
    )
    tensor_parallel: int = key(1, "Cards that share one model (SGLang, vLLM, llama.cpp).", minimum=1, maximum=64)
    device: str = key(
        "cpu",
        "Where the built-in engine computes: cpu, or cuda for the first card that CUDA_VISIBLE_DEVICES leaves. The planner does not know "
        "its memory on a card yet, and no figure was measured on one: kv_pool_bytes is then as much as beside the weights the card holds.",
        choices=("cpu", "cuda"),
    )
    threads: int = key(0, "CPU threads of the built-in engine; 0: one a core.", minimum=0, maximum=1024)
    context_length_tokens: int = key(0, "Longest prompt plus answer; 0: the model's own limit, cut to the KV pool.", minimum=0)
    prefill_chunk_tokens: int = key(
        0,
        "Tokens of one prefill step; the activation peak grows with it. 0: what suits the engine (256 of the built-in one and of "
        "llama.cpp, 2048 of SGLang and vLLM); else at least 16.",
        minimum=0,
        maximum=65536,
    )
    max_running: int = key(8, "Sequences decoded together.", minimum=1, maximum=4096)
    block_tokens: int = key(16, "Tokens of one KV block.", minimum=1, maximum=1024)
    kv_pool_bytes: int = key(512 * 1024**2, "Size of the KV pool of the built-in engine.", unit="bytes", minimum=1024**2)
    weights_dtype: str = key(
        "int8",
        "Of the built-in engine's weights in memory. int8 is several times as fast and takes a quarter of the memory; its choice of the "
        "next token is that of float32 in 97 of 100 cases. Where the processor or the model cannot have it, float32 is taken, and "
        "the engine's log says why. bfloat16 and float16 are for a card (engine.device), and then hold for its KV cache too; int8 means "
        "bfloat16 there.",
        choices=("int8", "float32", "bfloat16", "float16"),
    )
    swap_bytes: int = key(
        64 * 1024**2,
        "Host memory, beside the KV cache, of the built-in engine for answers that give way to older ones when the cache is full; "
        "beyond it they are computed again.",
        unit="bytes",
        minimum=0,
    )
    kv_dtype: str = key("auto", 'Of the KV cache of SGLang, vLLM and llama.cpp, such as "fp8_e4m3" or "bfloat16"; auto: that of the model.')
    draft_tokens: int = key(0, "Tokens drafted at each step by the model's own drafter (SGLang, vLLM); 0: none.", minimum=0, maximum=64)
    state_slots: int = key(
        0, "Slots of linear-attention state (SGLang); 0: three for each of max_running where the model has such layers.", minimum=0
    )
    state_dtype: str = key(
        "",
        "Of the linear-attention state (SGLang, vLLM); empty: bfloat16 with SGLang, that of the model with vLLM.",
        choices=("", "float32", "bfloat16", "float16"),
    )
    prefix_cache: bool = key(True, "Prompts that begin alike share that part (SGLang, vLLM).")
    language_only: bool = key(False, "Leave the vision tower of a model unloaded (SGLang, vLLM).")
    prefill_fraction: float = key(0.6, "Share of the KV pool that holds prompts; the rest holds answers.", minimum=0.05, maximum=0.95)
    extra_args: tuple[str, ...] = key((), "Arguments appended to the engine's command line; those that the appliance sets are refused.")
    environment: tuple[str, ...] = key((), 'Variables for SGLang, vLLM and llama.cpp, each "NAME=VALUE"; they win over ours.')
    warm_spare: bool = key(
        True,
        "Keep a second process of the built-in engine loaded and idle, to take over when the engine dies: the pause is under a second "
        "instead of several. It costs about 170 MiB of memory; the weights are shared.",
    )
    weight_holder: bool = key(
        False,
        "Keep the weights of the built-in engine in the shared memory of a process of their own, checked before each life's first "
        "request. It spares each start what it would have to convert: a checkpoint that is not stored as it is served, in a folder that "
        "the engine may not write to. It costs about 150 MiB of memory, and memory for the weights.",
    )


@dataclass(frozen=True, slots=True)
class GpuTable:
    """[gpu] the cards."""

    mode: str = key(
        "auto",
        "auto: wait for a card when the machine has one, else use the CPU; required: never serve without; off: never look.",
        choices=("auto", "required", "off"),
    )
    layout: str = key(
        "auto",
        "How the cards are shared out (docs/two-3090.md). auto: one engine, over engine.tensor_parallel cards; single: one engine on one "
        "card; tp: one engine over all cards; replicas: an engine on each card, and the gateway shares the requests out among them.",
        choices=("auto", "single", "tp", "replicas"),
    )
    p2p: str = key(
        "auto",
        "Whether the cards of one engine (SGLang, vLLM) read each other's memory, which its own all-reduce needs too. auto: not between "
        "consumer cards without an NVLink bridge (docs/two-3090.md); on: wherever the engine's own check passes; off: never.",
        choices=("auto", "on", "off"),
    )
    power_limit_w: float = key(
        0.0,
        "Power limit of each card in watts, set at boot where llm-appliance-cards.service is enabled; 0: as the driver has it.",
        minimum=0,
        maximum=2000,
    )
    wait_s: float = key(90.0, "How long to wait for the driver and the device nodes.", unit="s", minimum=0, maximum=3600)


@dataclass(frozen=True, slots=True)
class BudgetTable:
    """[budget] how memory is shared out."""

    mem_fraction: float = key(0.9, "Share of the memory free at start that weights, state and KV pool may take.", minimum=0.1, maximum=0.99)


@dataclass(frozen=True, slots=True)
class SupervisorTable:
    """[supervisor] how the engine is watched."""

    start_deadline_s: float = key(
        600.0,
        "An engine that does not answer by then has failed to start, unless it still reads files or takes memory.",
        unit="s",
        minimum=1,
        maximum=86400,
    )
    start_stall_s: float = key(
        30.0,
        "A start during which for so long nothing was read, no memory taken, no CPU used and nothing logged has failed.",
        unit="s",
        minimum=1,
        maximum=3600,
    )
    stop_deadline_s: float = key(30.0, "After SIGTERM; then the whole process group is killed.", unit="s", minimum=0.1, maximum=3600)
    probe_interval_s: float = key(1.0, "How often the engine is asked for its progress counters.", unit="s", minimum=0.05, maximum=60)
    probe_timeout_s: float = key(5.0, "An answer to a probe that takes longer counts as none.", unit="s", minimum=0.1, maximum=120)
    hang_floor_s: float = key(
        10.0,
        "Requests in flight and no progress for less than this is never called a hang.",
        unit="s",
        minimum=0.5,
        maximum=3600,
    )
    hang_ceiling_s: float = key(60.0, "Requests in flight and no progress for more than this always is.", unit="s", minimum=1, maximum=7200)
    canary_s: float = key(
        15.0,
        "An engine that was idle for so long is asked for a token: it may answer probes and be dead. 0: never. Needs an engine that counts "
        "its requests in /health, as the built-in one does.",
        unit="s",
        minimum=0,
        maximum=86400,
    )
    backoff_first_s: float = key(1.0, "Wait before the second restart in a row; the first has none.", unit="s", minimum=0, maximum=600)
    backoff_max_s: float = key(60.0, "The wait doubles up to this.", unit="s", minimum=0, maximum=3600)
    stable_after_s: float = key(3600.0, "An engine that served so long resets the counters.", unit="s", minimum=1, maximum=604800)
    start_failures_max: int = key(
        3,
        "Failed starts in a row, then PARKED: a person is needed. At least 11 where the cause may pass by itself, as a port in use does.",
        minimum=1,
        maximum=100,
    )
    on_park: tuple[str, ...] = key(
        (), "Command (argument list) run when parked; the sentence is its last argument. It has 30 s, with all that it starts."
    )
    auto_reboot: str = key(
        "never",
        "Reboot the machine when a lost card has it parked: never; idle: once nobody is logged in; always: at once. At most twice in "
        "24 hours.",
        choices=("never", "idle", "always"),
    )
    reboot_command: tuple[str, ...] = key(
        ("systemctl", "reboot"),
        "Command (argument list) of auto_reboot. The service's user has to be allowed to run it, here by a polkit rule for "
        "org.freedesktop.login1.reboot.",
    )


@dataclass(frozen=True, slots=True)
class LadderTable:
    """[ladder] safer settings after a crash."""

    climb_after_s: float = key(0.0, "After so long without a crash, go one rung back up; 0: never by itself.", unit="s", minimum=0)
    prove: str = key(
        "change",
        "When the longest prompt that a rung promises to take is run through the engine while its memory is measured (docs/budget.md): "
        "change: where the rung, the model or the engine's version is new, before clients are served, or in idle time where the plan "
        "leaves plenty; always: before clients are served, at each start; idle: once nobody asks for anything; off: never. A rung that "
        "leaves too little memory is left for the next one.",
        choices=("change", "always", "idle", "off"),
    )


@dataclass(frozen=True, slots=True)
class DiagnosisTable:
    """[diagnosis] evidence and verdicts."""

    log_ring_lines: int = key(4000, "Lines of the engine's log kept in memory.", minimum=100, maximum=1_000_000)
    kernel_log: str = key("/dev/kmsg", "Where kernel messages are read; empty: not at all.")
    patterns_dir: str = key(
        "/etc/llm-appliance/patterns.d",
        "Folder of your own patterns of log lines, *.toml files as in docs/failures.md; read when applianced starts. Empty: none.",
    )
    keep_incidents: int = key(1000, "Incidents kept; the oldest go first.", minimum=10, maximum=1_000_000)


@dataclass(frozen=True, slots=True)
class Config:
    """The effective configuration. Immutable: a reload makes a new one."""

    model: ModelTable = ModelTable()
    engine: EngineTable = EngineTable()
    gpu: GpuTable = GpuTable()
    budget: BudgetTable = BudgetTable()
    gateway: GatewayTable = GatewayTable()
    admission: AdmissionTable = AdmissionTable()
    resume: ResumeTable = ResumeTable()
    fallback: FallbackTable = FallbackTable()
    supervisor: SupervisorTable = SupervisorTable()
    ladder: LadderTable = LadderTable()
    diagnosis: DiagnosisTable = DiagnosisTable()
    metrics: MetricsTable = MetricsTable()


def tables() -> dict[str, type]:
    """Table name → its dataclass, in the order of the documentation."""
    return {f.name: type(f.default) for f in dataclasses.fields(Config)}
