"""From settings to a running engine. torch is imported inside, after its threads are settled."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.core.errors import BudgetError
from appliance.core.launch import ContinuesBy, EngineLimits
from appliance.engine.messages import Engine
from appliance.engine.settings import EngineSettings
from appliance.engine.threads import settle_openmp, thread_count

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from appliance.engine.block_pool import BlockPool, PoolGeometry
    from appliance.engine.card_runner import CardRunner
    from appliance.engine.models.config import DecoderConfig
    from appliance.engine.models.decoder import Decoder
    from appliance.engine.models.int8_decoder import Int8Decoder
    from appliance.engine.runner import ModelRunner
    from appliance.engine.sampler import Tokens
    from appliance.engine.scheduler import Scheduler
    from appliance.engine.weights import ModelWeights

log = logging.getLogger("appliance.engine.build")


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What an EngineLoop is made of; tests put something between."""

    runner: ModelRunner | CardRunner
    scheduler: Scheduler
    limits: EngineLimits
    threads: int
    choose_tokens: Tokens


def build_engine(settings: EngineSettings, decoder: Decoder | Int8Decoder | None = None) -> Engine:
    """Load the model, unless it is there already (engine/spare.py), and start the engine's thread.

    Raises:
        ModelError: the folder is missing, half-written, or not of a kind that the engine serves.
        BudgetError: the KV pool or the context length cannot be.
    """
    parts = load_parts(settings, decoder)
    from appliance.engine.loop import EngineLoop

    loop = EngineLoop(parts.runner, parts.scheduler, parts.limits, parts.threads, choose_tokens=parts.choose_tokens)
    loop.start()
    return loop


def load_decoder(model_path: Path, most_copied_bytes: int | None = None, weights_dtype: str = "float32") -> Decoder | Int8Decoder:
    """The weights, mapped.

    Args:
        weights_dtype: as in EngineSettings.
        most_copied_bytes: raise WouldCopy rather than copy more of them than this into memory of our own; None: copy.

    Raises:
        ModelError: see `build_engine`.
    """
    settle_openmp()
    from appliance.engine.models.decoder import Decoder
    from appliance.engine.models.registry import read_config
    from appliance.engine.weights import ModelWeights, read_config_json

    log.info("Load weight begin. model=%s", model_path)
    started_s = time.monotonic()
    config = read_config(read_config_json(model_path))
    weights = ModelWeights(model_path, most_copied_bytes)
    small = _int8_decoder(model_path, config, weights, most_copied_bytes is None) if weights_dtype == "int8" else None
    served_bytes = weights.served_bytes if small is None else small.weight_bytes
    decoder = Decoder(config, weights) if small is None else small
    log.info("Load weight end. bytes=%d elapsed=%.2f s", served_bytes, time.monotonic() - started_s)
    return decoder


def _int8_decoder(model_path: Path, config: DecoderConfig, weights: ModelWeights, may_copy: bool) -> Int8Decoder | None:
    """None where it cannot be, with a line in the log."""
    from appliance.engine.models.int8_decoder import Int8Decoder, why_not
    from appliance.engine.models.packed import load_packed

    obstacle = why_not(config)
    if obstacle is not None:
        log.warning("The weights are served in 32 bits instead of 8: %s.", obstacle)
        return None
    return Int8Decoder(config, weights, load_packed(model_path, config, weights, may_copy))


def load_parts(settings: EngineSettings, decoder: Decoder | Int8Decoder | None = None) -> EngineParts:
    """Raises as `build_engine`."""
    settle_openmp()
    import torch

    from appliance.engine.block_pool import PoolGeometry
    from appliance.engine.kv_cache import bytes_per_token
    from appliance.engine.models.registry import read_config
    from appliance.engine.scheduler import Scheduler
    from appliance.engine.weights import read_config_json

    threads = thread_count(settings.threads)
    torch.set_num_threads(threads)
    config = decoder.config if decoder is not None else read_config(read_config_json(settings.model_path))
    dtype = cache_dtype(settings)
    geometry = PoolGeometry.divide(settings.kv_pool_bytes, bytes_per_token(config, dtype), settings.block_tokens, settings.prefill_fraction)
    limits = EngineLimits(
        model_id=settings.model_id,
        context_length_tokens=_context_tokens(settings, config, geometry),
        max_running=settings.max_running,
        kv_tokens=geometry.total_blocks * geometry.block_tokens,
        max_prompt_tokens=geometry.prefill_tokens,
        max_new_tokens=geometry.decode_tokens - geometry.block_tokens + 2,
        continues_by=ContinuesBy.IDS,
    )
    on_card = settings.device == "cuda"
    placed = _on_card(settings, config, geometry, dtype) if on_card else _on_host(settings, decoder, geometry, threads)
    runner, pool, choose_tokens = placed
    log.info(
        "KV cache is allocated. bytes=%d prompt_tokens=%d answer_tokens=%d block_tokens=%d",
        settings.kv_pool_bytes,
        geometry.prefill_tokens,
        geometry.decode_tokens,
        geometry.block_tokens,
    )
    swap = runner if settings.swap_bytes else None
    scheduler = Scheduler(pool, settings.max_running, settings.prefill_chunk_tokens, settings.prefix_cache, swap)
    return EngineParts(runner, scheduler, limits, threads, choose_tokens)


def _on_host(
    settings: EngineSettings, decoder: Decoder | Int8Decoder | None, geometry: PoolGeometry, threads: int
) -> tuple[ModelRunner, BlockPool, Tokens]:
    from appliance.engine.block_pool import BlockPool
    from appliance.engine.faults import FaultyRunner
    from appliance.engine.models.int8_decoder import Int8Decoder
    from appliance.engine.runner import ModelRunner
    from appliance_kernels.sample.reference import tokens

    if decoder is None and settings.weight_holder:
        from appliance.engine.weight_holder_client import held_decoder

        decoder, _ = held_decoder(settings.weight_holder, settings.model_path, settings.weights_dtype)
    if decoder is None:
        decoder = load_decoder(settings.model_path, weights_dtype=settings.weights_dtype)
    if isinstance(decoder, Int8Decoder):
        decoder.set_threads(threads)
    pool = BlockPool(geometry)
    if settings.fault is None:
        return ModelRunner(decoder, pool, settings.swap_bytes), pool, tokens
    runner = FaultyRunner(decoder, pool, *settings.fault, settings.swap_bytes)
    return runner, pool, tokens


def _on_card(
    settings: EngineSettings, config: DecoderConfig, geometry: PoolGeometry, dtype: torch.dtype
) -> tuple[CardRunner, BlockPool, Tokens]:
    """A decoder that a spare prepared is on the host, and of no use here."""
    import torch

    from appliance.engine.card import build_on_card, check_dtype, open_card
    from appliance.engine.weights import ModelWeights

    card = open_card()
    check_dtype(dtype, torch.cuda.get_device_capability(card.device))
    if settings.weights_dtype == "int8":
        log.warning("The weights are served in bfloat16 instead of 8 bits, which are for the CPU.")
    log.info("Load weight begin. model=%s device=%s dtype=%s", settings.model_path, card.device, str(dtype).removeprefix("torch."))
    started_s = time.monotonic()
    weights = ModelWeights(settings.model_path)
    runner, pool = build_on_card(card, config, weights, geometry, settings.swap_bytes, dtype)
    served_bytes = weights.served_bytes * dtype.itemsize // torch.float32.itemsize
    log.info("Load weight end. bytes=%d elapsed=%.2f s", served_bytes, time.monotonic() - started_s)
    return runner, pool, card.tokens


def cache_dtype(settings: EngineSettings) -> torch.dtype:
    """Of the KV cache, and of what is computed: on a card that of the weights, on the CPU float32, whatever the weights are.

    Raises:
        BudgetError: the device does not have it.
    """
    import torch

    if settings.device == "cuda":
        from appliance.engine.card import card_dtype

        _refuse_host_options(settings)
        return card_dtype(settings.weights_dtype)
    if settings.weights_dtype not in ("float32", "int8"):
        raise BudgetError(
            f"--weights-dtype {settings.weights_dtype} is for --device cuda: the CPU computes in float32, with weights in 32 or 8 bits",
            hint="set [engine] weights_dtype to int8 or float32, or [engine] device to cuda",
        )
    return torch.float32


def _refuse_host_options(settings: EngineSettings) -> None:
    """What the card's path does not know is not left out in silence."""
    given = {
        "--weight-holder": bool(settings.weight_holder),
        "--fault": settings.fault is not None,
    }
    for option, is_given in given.items():
        if is_given:
            raise BudgetError(f"{option} is for the CPU; --device cuda has no part in it", hint=f"leave {option} out")


def _context_tokens(settings: EngineSettings, config: DecoderConfig, geometry: PoolGeometry) -> int:
    """What was asked for, or what model and pool allow."""
    pool_tokens = geometry.total_blocks * geometry.block_tokens
    asked = settings.context_length_tokens
    if asked > config.max_context_tokens:
        raise BudgetError(
            f"a context length of {asked} tokens exceeds the model's own limit of {config.max_context_tokens}",
            hint="lower [engine] context_length_tokens, or set it to 0",
        )
    if asked > pool_tokens:
        raise BudgetError(
            f"a context length of {asked} tokens exceeds the KV pool of {pool_tokens} tokens",
            hint="lower [engine] context_length_tokens, or raise kv_pool_bytes",
        )
    return asked or min(config.max_context_tokens, pool_tokens)
