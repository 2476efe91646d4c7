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

    from appliance.engine.block_pool import PoolGeometry
    from appliance.engine.models.config import DecoderConfig
    from appliance.engine.models.decoder import Decoder
    from appliance.engine.runner import ModelRunner
    from appliance.engine.scheduler import Scheduler

log = logging.getLogger("appliance.engine.build")


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What an EngineLoop is made of; tests put something between."""

    runner: ModelRunner
    scheduler: Scheduler
    limits: EngineLimits
    threads: int


def build_engine(settings: EngineSettings, decoder: Decoder | None = None) -> Engine:
    """Load the model, unless it is there already (engine/spare.py), and start the engine's thread.

    Raises:
        ModelError: the folder is missing, half-written, or not of a kind that the engine serves.
        BudgetError: the KV pool or the context length cannot be.
    """
    parts = load_parts(settings, decoder)
    from appliance.engine.loop import EngineLoop

    loop = EngineLoop(parts.runner, parts.scheduler, parts.limits, parts.threads)
    loop.start()
    return loop


def load_decoder(model_path: Path, most_copied_bytes: int | None = None) -> Decoder:
    """The weights, mapped.

    Args:
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
    decoder = Decoder(config, weights)
    log.info("Load weight end. bytes=%d elapsed=%.2f s", weights.served_bytes, time.monotonic() - started_s)
    return decoder


def load_parts(settings: EngineSettings, decoder: Decoder | None = None) -> EngineParts:
    """Raises as `build_engine`."""
    settle_openmp()
    import torch

    from appliance.engine.block_pool import BlockPool, PoolGeometry
    from appliance.engine.faults import FaultyRunner
    from appliance.engine.kv_cache import bytes_per_token
    from appliance.engine.models.registry import read_config
    from appliance.engine.runner import ModelRunner
    from appliance.engine.scheduler import Scheduler
    from appliance.engine.weights import read_config_json

    threads = thread_count(settings.threads)
    torch.set_num_threads(threads)
    config = decoder.config if decoder is not None else read_config(read_config_json(settings.model_path))
    geometry = PoolGeometry.divide(settings.kv_pool_bytes, bytes_per_token(config), settings.block_tokens, settings.prefill_fraction)
    limits = EngineLimits(
        model_id=settings.model_id,
        context_length_tokens=_context_tokens(settings, config, geometry),
        max_running=settings.max_running,
        kv_tokens=geometry.total_blocks * geometry.block_tokens,
        max_prompt_tokens=geometry.prefill_tokens,
        max_new_tokens=geometry.decode_tokens - geometry.block_tokens + 2,
        continues_by=ContinuesBy.IDS,
    )
    if decoder is None:
        decoder = load_decoder(settings.model_path)
    pool = BlockPool(geometry)
    runner = ModelRunner(decoder, pool) if settings.fault is None else FaultyRunner(decoder, pool, *settings.fault)
    log.info(
        "KV cache is allocated. bytes=%d prompt_tokens=%d answer_tokens=%d block_tokens=%d",
        settings.kv_pool_bytes,
        geometry.prefill_tokens,
        geometry.decode_tokens,
        geometry.block_tokens,
    )
    scheduler = Scheduler(pool, settings.max_running, settings.prefill_chunk_tokens, settings.prefix_cache)
    return EngineParts(runner, scheduler, limits, threads)


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
