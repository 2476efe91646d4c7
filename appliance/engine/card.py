"""The engine on a card: where its weights, its pool and its cache go, and what it needs before that."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from appliance.core.errors import BudgetError
from appliance.engine.block_pool import BlockPool, PoolGeometry
from appliance.engine.card_runner import CardRunner, wants_memory
from appliance.engine.models.config import DecoderConfig
from appliance.engine.models.decoder import Decoder, Weights
from appliance_kernels.on_card import OnCard


def open_card() -> OnCard:
    """The first card that CUDA_VISIBLE_DEVICES leaves.

    Raises:
        BudgetError: there is none, or no kernel can be launched there.
    """
    if not torch.cuda.is_available():
        built = f"torch {torch.__version__} is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is built without CUDA"
        raise BudgetError(
            f"--device cuda: no CUDA device is usable here ({built}, {torch.cuda.device_count()} devices are visible)",
            hint="leave out --device, install a torch that is built for CUDA, or look at `nvidia-smi`",
        )
    check_launcher()
    return OnCard(torch.device("cuda", 0))


def _make_launcher() -> None:
    """Triton compiles the C that launches its kernels, once for each home folder, when it is first asked for its driver."""
    triton.runtime.driver.active  # noqa: B018


def check_launcher(make: Callable[[], None] = _make_launcher) -> None:
    """Now, and not within the first client's request.

    Raises:
        BudgetError: Triton cannot compile it, or finds no libcuda.
    """
    try:
        make()
    except (OSError, RuntimeError, AssertionError, subprocess.CalledProcessError) as error:
        raise BudgetError(
            f"--device cuda: Triton cannot make the program that launches its kernels: {error}",
            hint="install a C compiler and this Python's headers (apt-get install gcc python3-dev); `ldconfig -p` must know libcuda.so.1",
        ) from error


def card_dtype(weights_dtype: str) -> torch.dtype:
    """Of weights, KV cache and activations on the card, for one of settings.WEIGHTS_DTYPES. 8 bits are for the CPU: bfloat16 stands in."""
    return {"float32": torch.float32, "float16": torch.float16}.get(weights_dtype, torch.bfloat16)


def check_dtype(dtype: torch.dtype, capability: tuple[int, int]) -> None:
    """Raises BudgetError where the card's tensor cores do not know the type."""
    if dtype is torch.bfloat16 and capability < (8, 0):
        raise BudgetError(
            f"bfloat16 needs a card of compute capability 8.0 or more; this one has {capability[0]}.{capability[1]}",
            hint="set [engine] weights_dtype to float16 or float32",
        )


@dataclass(frozen=True, slots=True)
class OnCardWeights:
    """A checkpoint's tensors, copied to the card as they are asked for; implements models.decoder.Weights.

    Attributes:
        dtype: of matrices. Norms and biases are few, and stay in float32.
    """

    weights: Weights
    device: torch.device
    dtype: torch.dtype = torch.float32

    def has(self, name: str) -> bool:
        """Whether the checkpoint has it."""
        return self.weights.has(name)

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor."""
        tensor = self.weights.get(name, shape)
        return (tensor.to(self.dtype) if tensor.ndim > 1 else tensor).to(self.device)

    def stacked(self, names: tuple[str, ...], rows: tuple[int, ...], columns: int) -> Tensor:
        """Matrices on top of each other."""
        return self.weights.stacked(names, rows, columns).to(self.dtype).to(self.device)


def build_on_card(
    card: OnCard,
    config: DecoderConfig,
    weights: Weights,
    geometry: PoolGeometry,
    swap_bytes: int = 0,
    dtype: torch.dtype = torch.float32,
) -> tuple[CardRunner, BlockPool]:
    """Weights, pool and cache in the card's memory; answers are set aside in the host's.

    Raises:
        ModelError: a tensor is missing or has another shape than the configuration says.
        BudgetError: the card has no room.
    """
    try:
        decoder = Decoder(config, OnCardWeights(weights, card.device, dtype), card)
        pool = BlockPool(geometry, card.take_step, card.device)
        return CardRunner(decoder, pool, card, swap_bytes), pool
    except RuntimeError as error:
        if not wants_memory(error):
            raise
        raise BudgetError(
            f"weights and KV pool do not fit the card: {error}", hint="lower [engine] kv_pool_bytes, or take a smaller model"
        ) from error
