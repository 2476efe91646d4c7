"""Other engines, to be measured beside ours: the same prompts' lengths, the same numbers of new tokens, the same threads."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path
from typing import Protocol

Rates = dict[int, tuple[float, float]]
"""By batch: tokens a second of prefill, and of decode, those of all sequences together."""


class Measured(Protocol):
    """Something that can be measured once more."""

    name: str

    def rates(self, batches: tuple[int, ...], prompt_tokens: int, new_tokens: int) -> Rates:
        """One repetition."""


class Llama:
    """llama.cpp's own llama-batched-bench over a GGUF file, in a process of its own. Its times are those of the computation alone."""

    def __init__(self, program: Path, gguf: Path, threads: int) -> None:
        self.name = f"llama.cpp {_quantisation(gguf)}"
        self._command = [str(program), "-m", str(gguf), "-t", str(threads), "-tb", str(threads), "-ngl", "0", "-fa", "auto"]

    def rates(self, batches: tuple[int, ...], prompt_tokens: int, new_tokens: int) -> Rates:
        """One call: it does all batches."""
        context = max(batches) * (prompt_tokens + new_tokens)
        sizes = ["-c", str(context), "-npp", str(prompt_tokens), "-ntg", str(new_tokens), "-npl", ",".join(map(str, batches))]
        ended = subprocess.run([*self._command, *sizes], capture_output=True, text=True, check=True)
        found: Rates = {}
        for line in ended.stdout.splitlines():
            cells = [cell.strip() for cell in line.strip("| ").split("|")]
            if len(cells) == 10 and re.fullmatch(r"\d+", cells[2]):  # PP, TG, B, N_KV, T_PP, S_PP, T_TG, S_TG, T, S
                found[int(cells[2])] = (float(cells[5]), float(cells[7]))
        if found.keys() != set(batches):
            raise SystemExit(f"llama-batched-bench said nothing of some batches:\n{ended.stdout[-2000:]}")
        return found


def _quantisation(gguf: Path) -> str:
    found = re.search(r"[QF]\d+(_[A-Z0-9]+)*", gguf.stem)
    return found.group() if found else gguf.stem


class Transformers:
    """Hugging Face's `generate`, in float32."""

    name = "transformers float32"

    def __init__(self, folder: Path, threads: int) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        transformers.utils.logging.set_verbosity_error()
        self._torch = torch
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def rates(self, batches: tuple[int, ...], prompt_tokens: int, new_tokens: int) -> Rates:
        """Decode is what more than one new token takes longer."""
        found: Rates = {}
        for batch in batches:
            first_s, all_s = (self._seconds(batch, prompt_tokens, count) for count in (1, new_tokens))
            found[batch] = (batch * prompt_tokens / first_s, batch * (new_tokens - 1) / max(all_s - first_s, 1e-9))
        return found

    def _seconds(self, batch: int, prompt_tokens: int, new_tokens: int) -> float:
        ids = self._torch.randint(100, 9000, (batch, prompt_tokens))
        started_s = time.perf_counter()
        with self._torch.inference_mode():
            self._model.generate(ids, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, use_cache=True)
        return time.perf_counter() - started_s
