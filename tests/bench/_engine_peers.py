"""Other engines, to be measured beside ours: the same prompts' lengths, the same numbers of new tokens, the same threads."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Protocol, Self

from appliance.backends.wording import OFFLINE

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


class Asked:
    """What can only generate, in a process of its own that is asked (_asked.py), and ends with the `with` block.

    Prefill is one new token, decode what more of them take longer. The process is stopped while others have their turn: its threads may go
    on looking for work, and vLLM's took a third of what ours measured beside it. What our own engine sets for itself, it does not get.
    """

    name: str
    ANSWER_S = 900.0
    """For the start, which may compile, and for each answer."""
    END_S = 30.0

    def __init__(self, python: Path, program: str, arguments: list[str], told: dict[str, str]) -> None:
        self.peak_bytes = 0
        self._home = tempfile.TemporaryDirectory(prefix="bench-asked-")
        self._log = Path(self._home.name) / "log"
        folders = dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"), self._home.name)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "OPENBLAS_"))}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(python), str(Path(__file__).with_name(program)), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=inherited | OFFLINE | folders | told,
                cwd=self._home.name,
                start_new_session=True,
            )

    def rates(self, batches: tuple[int, ...], prompt_tokens: int, new_tokens: int) -> Rates:
        """One repetition."""
        found: Rates = {}
        for batch in batches:
            first_s, all_s = (self._seconds(batch, prompt_tokens, count) for count in (1, new_tokens))
            found[batch] = (batch * prompt_tokens / first_s, batch * (new_tokens - 1) / max(all_s - first_s, 1e-9))
        return found

    def __enter__(self) -> Self:
        try:
            self._answer()
        except BaseException:
            self.__exit__()
            raise
        self._tell(signal.SIGSTOP)
        return self

    def __exit__(self, *_: object) -> None:
        """The end of its input ends it; what does not end so is killed, with all that it has started."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._tell(signal.SIGCONT)
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        select.select([self._process.stdout], [], [], self.END_S)  # its end closes it; not reaped before its group is gone
        self._tell(signal.SIGKILL)
        self._process.wait()
        self._home.cleanup()

    def _tell(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _seconds(self, batch: int, prompt_tokens: int, new_tokens: int) -> float:
        """Of generating so many tokens for each of a batch of fresh prompts."""
        assert self._process.stdin is not None
        asked = {"batch": batch, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens}
        self._tell(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either
            self._process.stdin.write(json.dumps(asked).encode() + b"\n")
            self._process.stdin.flush()
        answer = self._answer()
        self._tell(signal.SIGSTOP)
        self.peak_bytes = answer["peak_bytes"]
        return float(answer["seconds"])

    def _answer(self) -> dict[str, Any]:
        """A line; an end with what it said last when there is none."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], self.ANSWER_S)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            why = "ended" if ready else f"said nothing for {self.ANSWER_S:g} s"
            raise SystemExit(f"{self.name} {why}:\n{self._log.read_text(errors='replace')[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


class Transformers(Asked):
    """Hugging Face's `generate`, in float32."""

    name = "transformers float32"

    def __init__(self, folder: Path, threads: int) -> None:
        super().__init__(Path(sys.executable), "_transformers_rates.py", [str(folder), str(threads)], {})


class Vllm(Asked):
    """vLLM as it is built for CPUs, in float32, in an environment of its own.

    It computes in the process that is asked (VLLM_ENABLE_V1_MULTIPROCESSING=0): its usual two further ones talk by spinning, which takes a
    core from its own threads where there are two, and leave shared memory behind when they are killed. Compiled, as it is by default.
    The libgomp is what it preloads into its workers.
    """

    name = "vLLM float32"

    def __init__(self, python: Path, folder: Path, threads: int, length_tokens: int, sequences: int) -> None:
        libgomp = next(python.parents[1].glob("lib/python3.*/site-packages/torch/lib/libgomp*.so*"), None)
        told = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": "",
        }
        if libgomp:
            told["LD_PRELOAD"] = str(libgomp)
        super().__init__(python, "_vllm_rates.py", [str(folder), str(length_tokens), str(sequences)], told)
