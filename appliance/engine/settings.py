"""What one engine life is told at its start. Built from the command line by `__main__`, read by `build`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FAULTS = ("stray", "sealed", "foreign", "freed", "unreadable", "overrun", "leaked")
"""See faults.py."""
DEVICES = ("cpu", "cuda")
WEIGHTS_DTYPES = ("float32", "int8", "bfloat16", "float16")
"""int8 is for the CPU, 16 bits are for a card."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The rung, as the built-in engine understands it. Defaults are those of appliance/config/schema.py.

    Attributes:
        model_path: folder with config.json, *.safetensors and tokenizer.json.
        model_name: the id that clients use; empty: the folder's name.
        threads: CPU threads; 0: one a core.
        context_length_tokens: longest prompt plus answer; 0: the model's own limit, cut to the KV pool.
        prefill_chunk_tokens: tokens of one prefill step.
        max_running: sequences decoded together.
        block_tokens: tokens of one KV block.
        kv_pool_bytes: size of the KV cache.
        prefill_fraction: share of its blocks that holds prompts; the rest holds answers.
        prefix_cache: take what begins as something did before from the cache. Off, for measurements.
        device: one of DEVICES; cuda is the first card that CUDA_VISIBLE_DEVICES leaves.
        weights_dtype: one of WEIGHTS_DTYPES; int8 where machine and model allow it, bfloat16 in its place on a card. There KV cache and
            activations have this type too.
        swap_bytes: host memory for answers that gave way to older ones; beyond it they are computed again.
        weight_holder: socket of the process that may hold the weights (weight_holder.py); empty: there is none.
        fault: for tests: a damage and the decode step at which it is done; see faults.py. None: none.
    """

    model_path: Path
    model_name: str = ""
    threads: int = 0
    context_length_tokens: int = 0
    prefill_chunk_tokens: int = 256
    max_running: int = 8
    block_tokens: int = 16
    kv_pool_bytes: int = 512 * 1024**2
    prefill_fraction: float = 0.6
    prefix_cache: bool = True
    device: str = "cpu"
    weights_dtype: str = "float32"
    swap_bytes: int = 64 * 1024**2
    weight_holder: str = ""
    fault: tuple[str, int] | None = None

    @property
    def model_id(self) -> str:
        """The id that clients use."""
        return self.model_name or self.model_path.resolve().name
