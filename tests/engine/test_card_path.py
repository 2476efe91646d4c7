"""The engine's path for cards, on a machine without one: every operation a Triton kernel in Triton's interpreter."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.build import compile_module_from_src

from appliance.core.errors import BudgetError
from appliance.engine import card, card_runner
from appliance.engine.build import load_parts
from appliance.engine.card import card_dtype, check_dtype, check_launcher
from appliance.engine.card_runner import CardFailed, CardRunner
from appliance.engine.settings import WEIGHTS_DTYPES, EngineSettings
from appliance_kernels.on_card import OnCard
from tests.engine.pretend_card import CARD, HOST, PretendCard, WrongDevice
from tests.engine.test_tiny_models import CASES, GEMMA, SIZES, save_checkpoint

LLAMA = transformers.LlamaConfig(**SIZES | {"num_hidden_layers": 2})
BIASED = transformers.LlamaConfig(**SIZES | {"num_hidden_layers": 2, "attention_bias": True, "head_dim": 16})
GEMMA3 = transformers.Gemma3TextConfig(**GEMMA | {"num_hidden_layers": 2, "sliding_window_pattern": 2, "sliding_window": 9})


@pytest.mark.parametrize(("config", "damage"), [(LLAMA, "damaged"), (GEMMA3, "")], ids=["llama-damaged", "gemma3"])
def test_the_cards_path_says_what_the_cpus_says(config: transformers.PreTrainedConfig, damage: str, tmp_path: Path) -> None:
    """Batches, chunks, a drawn and a penalised answer, one that gives way and is set aside, a second turn out of the prefix cache: the
    same tokens, and as many cached. Nothing of the host's is mixed with what is on the card. Also with a block table that is spoiled on
    the way: the access is refused, and the answer computed again apart."""
    told, log = card_path(config, tmp_path, damage)
    host, card = told["host"], told["card"]
    assert [answer["error"] for answer in host["answers"]] == [None] * 4
    assert len({tuple(answer["token_ids"]) for answer in host["answers"]}) == 4, "a model that always says the same tests nothing"
    assert host["answers"][2]["cached_tokens"] > 0
    assert [answer["judged"] for answer in host["answers"]] == [0, 0, 0, 2]
    assert host["preemptions"] == host["swaps"] > 0
    assert [answer["token_ids"] for answer in card["answers"]] == [answer["token_ids"] for answer in host["answers"]]
    if damage:
        assert card["violations"] > 0
        assert "KV access refused" in log
    else:
        assert card == host


def card_path(config: transformers.PreTrainedConfig, folder: Path, how: str) -> tuple[dict[str, Any], str]:
    """What card_path.py tells of this model, and its log."""
    save_checkpoint(config, folder)
    root = Path(__file__).parents[2]
    command = [sys.executable, str(Path(__file__).with_name("card_path.py")), str(folder), "interpreter", *how.split()]
    paths = os.pathsep.join([str(root), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": paths}, cwd=root)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1]), ran.stderr


@pytest.mark.parametrize(
    ("config", "dtype", "error"), [(BIASED, "float16", 0.02), (GEMMA3, "bfloat16", 0.1)], ids=["llama-float16", "gemma3-bfloat16"]
)
def test_the_cards_path_in_16_bits(config: transformers.PreTrainedConfig, dtype: str, error: float, tmp_path: Path) -> None:
    """Weights, activations and KV cache: the same steps, preemptions and cached tokens, logits that are off by no more than such numbers
    make them, and half the memory. (The model is random, its layers a few: a wrong product would be off by as much as it is large.)"""
    told, _ = card_path(config, tmp_path, dtype)
    host, card = told["host"], told["card"]
    assert card == host
    assert host["preemptions"] == host["swaps"] > 0
    assert 0 < told["error"] < error
    assert told["block_bytes"] == 4 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2


def test_a_card_that_is_not_there_is_refused_with_a_cure(tmp_path: Path) -> None:
    """By name, before weights are read."""
    save_checkpoint(CASES["llama"](), tmp_path)
    with pytest.raises(BudgetError, match="--device cuda: no CUDA device is usable here") as caught:
        load_parts(EngineSettings(tmp_path, device="cuda"))
    assert "nvidia-smi" in str(caught.value.hint)


def _store_one(target_ptr) -> None:  # type: ignore[no-untyped-def]
    tl.store(target_ptr, 1.0)


def test_the_pretended_card_refuses_what_cuda_refuses() -> None:
    """Sums, values and indices of two sides, and a kernel on the host's memory; not what CUDA allows."""
    kernel = interpreter.InterpretedFunction(_store_one)
    with PretendCard() as card:
        there, here = torch.zeros(3, device=CARD), torch.zeros(3)
        assert there.is_cuda
        assert (there + 1).device == CARD
        assert there.cpu().device == there.to(HOST).device == HOST
        assert here.to(CARD).is_cuda
        assert there[torch.tensor([0, 2])].is_cuda
        there.copy_(here)
        kernel[(1,)](there)
        assert there.tolist() == [1.0, 0.0, 0.0]
        assert here.tolist() == [0.0, 0.0, 0.0]
        for mix in (
            lambda: there + here,
            lambda: torch.cat((there, here)),
            lambda: here[torch.tensor([0], device=CARD)],
            lambda: there.__setitem__(0, here),
            lambda: kernel[(1,)](here),
        ):
            with pytest.raises(WrongDevice):
                mix()
        assert card.launches == 1


MEMORY = (
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
)
DEFECTS = (
    torch.AcceleratorError("an illegal memory access"),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
)


@pytest.mark.parametrize("error", MEMORY, ids=str)
def test_a_card_without_memory_is_tried_again(error: RuntimeError, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever says it: torch, Triton where it loads a kernel, cuBLAS. The next try begins with an emptied cache of torch's."""
    emptied: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append("emptied"))
    runner = _failing([error, None])
    with pytest.raises(RuntimeError) as caught:
        runner.prefill([])
    assert caught.value is error
    assert emptied == [], "nothing can be given back while the error holds it"
    assert runner.prefill([]) is None
    assert emptied == ["emptied"]


@pytest.mark.parametrize("error", DEFECTS, ids=str)
def test_a_card_that_failed_is_not_tried_again(error: RuntimeError) -> None:
    """The loop takes a RuntimeError of a prefill for want of memory: another error, of the driver or of ours, must not look like one."""
    with pytest.raises(CardFailed, match=re.escape(str(error))) as caught:
        _failing([error]).prefill([])
    assert not isinstance(caught.value, RuntimeError)


def _failing(results: list[RuntimeError | None]) -> CardRunner:
    class Failing(CardRunner):
        def __init__(self) -> None:
            self._short_of_memory = False

        def _prefill(self, chunks: object) -> None:  # type: ignore[override]
            result = results.pop(0)
            if result is not None:
                raise result

    return Failing()


@pytest.mark.parametrize("error", [*MEMORY, RuntimeError("CUDA error: out of memory")], ids=str)
def test_a_card_that_is_full_is_said_to_be_so(error: RuntimeError, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another process, say: at the start with what to lower, for a safe path as any want of memory. Another error is none of these."""
    raised: list[RuntimeError] = []

    def full(*_: object) -> None:
        raise raised[-1]

    monkeypatch.setattr(card, "Decoder", full)
    monkeypatch.setattr(card_runner, "CardRunner", full)
    runner = _failing([])
    runner._decoder = runner._card = None  # type: ignore[assignment]
    raised.append(error)
    with pytest.raises(BudgetError, match="weights and KV pool do not fit the card") as caught:
        card.build_on_card(OnCard(HOST), None, None, None)  # type: ignore[arg-type]
    assert "kv_pool_bytes" in str(caught.value.hint)
    with pytest.raises(MemoryError):
        runner.beside(None)  # type: ignore[arg-type]
    raised.append(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    for use in (lambda: card.build_on_card(OnCard(HOST), None, None, None), lambda: runner.beside(None)):  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            use()


def test_what_kernels_are_launched_with_is_made_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles it in C when it is first needed: without a compiler, or without Python's headers, the engine says so before it
    loads anything, with the cure, and not within the first client's prompt."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    source = "#include <no-such-header.h>"
    for compiler in (str(tmp_path / "no-such-compiler"), "cc"):
        monkeypatch.setenv("CC", compiler)
        with pytest.raises(
            BudgetError, match=r"Triton cannot make the program that launches its kernels: .*(No such file|non-zero)"
        ) as caught:
            check_launcher(lambda: compile_module_from_src(source, "launcher"))
        assert "apt-get install gcc python3-dev" in str(caught.value.hint)
    with pytest.raises(BudgetError, match=r"libcuda\.so cannot found|0 active drivers"):
        check_launcher()


@pytest.mark.parametrize(
    ("option", "changes"),
    [
        ("--weight-holder", {"weight_holder": "/run/holder.sock"}),
        ("--fault", {"fault": ("stop", 3)}),
    ],
)
def test_what_a_card_does_not_know_is_refused(option: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Named, before any card is looked for; it is not left out in silence."""
    save_checkpoint(LLAMA, tmp_path)
    with pytest.raises(BudgetError, match=f"{option} is for the CPU") as caught:
        load_parts(EngineSettings(tmp_path, device="cuda", **changes))
    assert caught.value.hint == f"leave {option} out"


def test_a_card_computes_in_what_the_weights_are_served_in() -> None:
    """8 bits are for the CPU: bfloat16 stands in. A card that does not know bfloat16 is refused with what it knows."""
    names = {name: str(card_dtype(name)) for name in WEIGHTS_DTYPES}
    assert names == {"float32": "torch.float32", "int8": "torch.bfloat16", "bfloat16": "torch.bfloat16", "float16": "torch.float16"}
    check_dtype(torch.bfloat16, (8, 6))
    check_dtype(torch.float16, (7, 5))
    with pytest.raises(BudgetError, match=r"compute capability 8\.0 or more; this one has 7\.5") as caught:
        check_dtype(torch.bfloat16, (7, 5))
    assert "float16" in str(caught.value.hint)


def test_16_bits_are_not_for_the_cpu(tmp_path: Path) -> None:
    """Said before a weight is read; the CPU computes in float32."""
    save_checkpoint(LLAMA, tmp_path)
    with pytest.raises(BudgetError, match="--weights-dtype bfloat16 is for --device cuda") as caught:
        load_parts(EngineSettings(tmp_path, weights_dtype="bfloat16"))
    assert "int8 or float32" in str(caught.value.hint)
