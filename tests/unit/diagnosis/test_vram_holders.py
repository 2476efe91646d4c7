"""Of an engine that finds no memory when it starts: whose memory it was."""

# ruff: noqa: E501 (log lines are quoted as they are printed)

from __future__ import annotations

import pytest

from appliance.core.causes import Cause
from appliance.core.diagnosis import Diagnosis
from appliance.core.evidence import Source
from appliance.diagnosis import diagnose, read_evidence

LOADING = "(EngineCore_DP0 pid=201) INFO 02-14 02:09:40 [gpu_model_runner.py:3720] Starting to load model /models/m...\n"
SENTENCE = (
    "{who}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 192.00 MiB. GPU 0 has a total capacity of 22.30 GiB of which {rest}"
)
READY = "INFO:     Application startup complete.\n"
SMI = "|  0   N/A  N/A   {pid}   C   {name}   20768MiB |\n"


def verdict(engine: str, smi: str = "") -> Diagnosis:
    """Of an engine's log and what nvidia-smi lists."""
    return diagnose([*read_evidence(engine, Source.ENGINE_LOG), *read_evidence(smi, Source.NVIDIA_SMI)])


def oom(rest: str, who: str = "(EngineCore_DP0 pid=201) ERROR 02-14 02:09:42 [core.py:937] ") -> str:
    """PyTorch's sentence."""
    return SENTENCE.format(who=who, rest=rest) + "\n"


OTHERS = "31.06 MiB is free. Process 162519 has 20.28 GiB memory in use. Process 201 has 1.98 GiB memory in use."
IN_A_CONTAINER = (
    "31.06 MiB is free. Process 7001 has 20.28 GiB memory in use. Process 7002 has 1.98 GiB memory in use. "
    "Of the allocated memory {used} GiB is allocated by PyTorch, and 9.50 MiB is reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize(
    ("rest", "cause"),
    [
        (OTHERS, Cause.VRAM_HELD_BY_OTHER),
        (IN_A_CONTAINER.format(used="1.62"), Cause.VRAM_HELD_BY_OTHER),
        (IN_A_CONTAINER.format(used="19.70"), Cause.CUDA_OOM_STARTUP),
        ("31.06 MiB is free. Including non-PyTorch memory, this process has 1.98 GiB memory in use.", Cause.VRAM_HELD_BY_OTHER),
        ("31.06 MiB is free. Including non-PyTorch memory, this process has 22.20 GiB memory in use.", Cause.CUDA_OOM_STARTUP),
        (
            "31.06 MiB is free. Process 9 has 0.50 GiB memory in use. Including non-PyTorch memory, this process has 21.70 GiB memory in use.",
            Cause.CUDA_OOM_STARTUP,
        ),
        (
            "31.06 MiB is free. Process 9981 has 22.20 GiB memory in use. Of the allocated memory 21.9 GiB is allocated by PyTorch.",
            Cause.CUDA_OOM_STARTUP,
        ),
    ],
    ids=[
        "by-number",
        "by-size",
        "the-large-one-is-ours",
        "by-what-is-missing",
        "all-ours",
        "a-small-neighbour",
        "ours-under-another-number",
    ],
)
def test_pytorch_s_own_count_tells(rest: str, cause: Cause) -> None:
    """It lists who has memory of the card; a container's engine does not know itself by those numbers."""
    assert verdict(LOADING + oom(rest)).cause is cause


def test_the_old_sentence_tells_too() -> None:
    """Total, free and what PyTorch reserved; the difference is somebody's."""
    text = "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 23.69 GiB total capacity; {own} GiB already allocated; 5.56 MiB free; {own} GiB reserved in total by PyTorch)\n"
    assert verdict(LOADING + text.format(own="1.82")).cause is Cause.VRAM_HELD_BY_OTHER
    assert verdict(LOADING + text.format(own="22.90")).cause is Cause.CUDA_OOM_STARTUP


def test_while_it_serves_it_is_the_engine_s_own_peak() -> None:
    """Others that came later are found by other means."""
    assert verdict(LOADING + READY + oom(OTHERS)).cause is not Cause.VRAM_HELD_BY_OTHER


LLAMA = """ggml_cuda_init: found 1 CUDA devices:
  Device 0: NVIDIA GeForce RTX 3090, compute capability 8.6, VMM: yes, VRAM: 24126 MiB
llama_model_load_from_file_impl: using device CUDA0 (NVIDIA GeForce RTX 3090) - {free} MiB free
load_tensors: loading model tensors, this can take a while... (mmap = true)
ggml_backend_cuda_buffer_type_alloc_buffer: allocating 8148.00 MiB on device 0: cudaMalloc failed: out of memory
"""
OLLAMA = """time=2025-02-20T08:01:02.202+01:00 level=INFO source=types.go:130 msg="inference compute" id=GPU-1 library=cuda variant=v12 compute=8.6 driver=12.6 name="NVIDIA GeForce RTX 3090" total="23.7 GiB" available="{free}"
time=2025-02-20T08:01:12.202+01:00 level=INFO source=server.go:405 msg="starting llama server" cmd="/usr/bin/ollama runner"
ggml_backend_cuda_buffer_type_alloc_buffer: allocating 4096.00 MiB on device 0: cudaMalloc failed: out of memory
"""
SGLANG = """[2026-08-16 08:00:10 TP0] Load weight begin. avail mem={free} GB
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 48.00 MiB. GPU 0 has a total capacity of 23.56 GiB of which 5.19 MiB is free.
"""


@pytest.mark.parametrize(
    ("log", "little", "all_of_it"), [(LLAMA, "912", "23800"), (OLLAMA, "1.2 GiB", "23.4 GiB"), (SGLANG, "2.10", "23.20")]
)
def test_what_was_free_before_the_weights_came_tells(log: str, little: str, all_of_it: str) -> None:
    """llama.cpp, ollama and SGLang write it down when they start."""
    assert verdict(log.format(free=little)).cause is Cause.VRAM_HELD_BY_OTHER
    assert verdict(log.format(free=all_of_it)).cause is Cause.CUDA_OOM_STARTUP


def test_nvidia_smi_tells_where_numbers_or_names_can_be_told_apart() -> None:
    """An engine in a container has other numbers there; a browser is none."""
    host = LOADING.replace("201", "20177") + oom("31.06 MiB is free.", "(EngineCore_DP0 pid=20177) ERROR ")
    assert verdict(host, SMI.format(pid=16251, name="VLLM::EngineCore")).cause is Cause.VRAM_HELD_BY_OTHER
    assert verdict(host, SMI.format(pid=20177, name="VLLM::EngineCore")).cause is Cause.CUDA_OOM_STARTUP
    container = LOADING + oom("31.06 MiB is free.")
    assert verdict(container, SMI.format(pid=16251, name="VLLM::EngineCore")).cause is Cause.CUDA_OOM_STARTUP
    assert verdict(container, SMI.format(pid=16251, name="/opt/blender/blender")).cause is Cause.VRAM_HELD_BY_OTHER
