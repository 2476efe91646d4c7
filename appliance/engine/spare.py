"""A warm spare: a process that has done what an engine's start costs, and is no engine. docs/adr/0031-warm-spare.md.

It holds no KV pool, listens nowhere and serves nothing. applianced starts it beside a serving engine and talks to it over its
standard input, a SOCK_SEQPACKET socket, one message a packet:

    spare → "warm mapped"       loaded, weights mapped and run through once
    spare → "warm imported"     loaded but for weights, which this checkpoint would have to copy
    → "ping", → "pong"          at any time
    → a JSON list               an engine's command line: "taken", and the process goes on as that engine

At the end of that file applianced is gone, or wants the spare gone: it exits.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.core.errors import ModelError
from appliance.engine.settings import EngineSettings
from appliance.engine.text import ModelText
from appliance.engine.threads import settle_openmp

if TYPE_CHECKING:
    from appliance.engine.models.decoder import Decoder
    from appliance.engine.models.int8_decoder import Int8Decoder
    from appliance.engine.weight_holder_client import HeldWeights

MOST_COPIED_BYTES = 32 * 1024**2
"""A checkpoint that is stored in another type than it is computed in would lie in memory once more."""
_WARM_UP_PROMPT_TOKENS = 8
_EXIT_NO_CHANNEL = 2
_EXIT_BAD_MODEL = 66
_EXIT_DEFECT = 70
_MESSAGE_MAX_BYTES = 1024**2

log = logging.getLogger("appliance.engine.spare")


@dataclass(frozen=True, slots=True)
class Prepared:
    """What an engine of this model folder need not do again; `decoder` is None where its weights have to be copied.

    Attributes:
        held: where its weights lie, if in a holder's memory.
    """

    model_path: Path
    text: ModelText
    decoder: Decoder | Int8Decoder | None
    held: HeldWeights | None = None

    def usable_decoder(self) -> Decoder | Int8Decoder | None:
        """What is held may have been written to since it was mapped, by whatever ended the last engine: it is checked again."""
        if self.held is not None:
            from appliance.engine.weight_holder_client import is_good

            return self.decoder if is_good(self.held, self.model_path) else None
        return self.decoder


class Spare:
    """Owns the channel and what is being prepared, until it is told what engine it is."""

    def __init__(self, settings: EngineSettings, channel: socket.socket) -> None:
        self._settings = settings
        self._channel = channel
        self._prepared: Prepared | None = None
        self._preparing = threading.Thread(target=self._prepare, name="prepare", daemon=True)

    def wait(self) -> tuple[Sequence[str], Prepared]:
        """The arguments of the engine to be, once it is told. Exits where there is nothing to wait for any more."""
        self._preparing.start()
        while message := self._receive():
            if message == b"ping":
                self._channel.send(b"pong")
                continue
            command = json.loads(message)
            self._preparing.join()  # by now it is done: nobody tells us before we said that we are warm
            assert self._prepared is not None, "told to take over before it was warm"
            self._channel.send(b"taken")
            self._channel.close()
            return command[command.index("-m") + 2 :], self._prepared
        log.info("The spare is not needed any more.")
        logging.shutdown()
        os._exit(0)

    def _receive(self) -> bytes:
        with contextlib.suppress(ConnectionError):
            return self._channel.recv(_MESSAGE_MAX_BYTES)
        return b""

    def _prepare(self) -> None:
        """In a thread of its own, because the kernel keeps priorities a thread and gives none back to an ordinary user: this one
        takes only what nobody else wants of the CPU, and the engine that the process becomes is served as any other."""
        code = _EXIT_DEFECT
        try:
            with contextlib.suppress(OSError):  # a sandbox may forbid it: then the engine beside us is a little slower for a while
                os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            started_s = time.monotonic()
            self._prepared = prepare(self._settings)
            how = "imported" if self._prepared.decoder is None else "mapped"
            log.info("The spare is warm. weights=%s elapsed=%.2f s", how, time.monotonic() - started_s)
            with contextlib.suppress(ConnectionError):  # then the main thread sees the end of the file
                self._channel.send(f"warm {how}".encode())
            return
        except ModelError as error:
            log.error("ModelError: %s", error)
            code = _EXIT_BAD_MODEL
        except Exception:  # not to be lost in a thread while the process looks healthy
            log.exception("The spare failed in a way that nobody foresaw; please report this")
        logging.shutdown()
        os._exit(code)


def stand_by(settings: EngineSettings) -> tuple[Sequence[str], Prepared]:
    """Be a spare on standard input, until told to be an engine: its arguments, and what need not be done again."""
    try:
        channel = socket.socket(fileno=os.dup(0))
    except OSError as error:
        print(f"--spare is for applianced: standard input is no socket ({error.strerror})", file=sys.stderr)
        sys.exit(_EXIT_NO_CHANNEL)
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    return Spare(settings, channel).wait()


def prepare(settings: EngineSettings) -> Prepared:
    """Everything of an engine's start that does not depend on its rung.

    Raises:
        ModelError: the folder is missing, half-written, or not of a kind that the engine serves.
    """
    text = ModelText(settings.model_path)
    settle_openmp()
    from appliance.engine import loop, server  # noqa: F401 - for their imports, torch above all
    from appliance.engine.build import load_decoder
    from appliance.engine.weights import WouldCopy

    decoder: Decoder | Int8Decoder | None = None
    held: HeldWeights | None = None
    if settings.weight_holder:
        from appliance.engine.weight_holder_client import held_decoder

        decoder, held = held_decoder(settings.weight_holder, settings.model_path, settings.weights_dtype)
    try:
        decoder = decoder or load_decoder(settings.model_path, MOST_COPIED_BYTES, settings.weights_dtype)
        warm_up(decoder, settings)
    except WouldCopy as reason:
        log.info("The weights are left for the engine to load: %s.", reason)
    gc.collect()
    gc.freeze()
    ctypes.CDLL(None).malloc_trim(0)
    return Prepared(settings.model_path, text, decoder, held)


def warm_up(decoder: Decoder | Int8Decoder, settings: EngineSettings) -> None:
    """One short answer over a cache of a few blocks, which is given back: every page of the weights is in our page table then, and the
    libraries have compiled their kernels. It takes 0.4 s that the first answer would take."""
    from appliance.engine.build import load_parts
    from appliance.engine.kv_cache import bytes_per_token
    from appliance.engine.loop import EngineLoop
    from appliance.engine.messages import GenerateRequest, SamplingParams
    from appliance.engine.models.int8_decoder import Int8Decoder

    blocks = 8 + 2 * -(-_WARM_UP_PROMPT_TOKENS // settings.block_tokens)
    pool_bytes = blocks * settings.block_tokens * bytes_per_token(decoder.config)
    # Threads of ours would keep the priority of this one, and the engine wait for them where others take the cores.
    threads = 1 if isinstance(decoder, Int8Decoder) else settings.threads
    small = replace(settings, kv_pool_bytes=pool_bytes, context_length_tokens=0, max_running=1, threads=threads)
    parts = load_parts(small, decoder)
    loop = EngineLoop(parts.runner, parts.scheduler, parts.limits, parts.threads)
    prompt = (0,) * _WARM_UP_PROMPT_TOKENS
    loop.submit(GenerateRequest("warm-up", prompt, SamplingParams(max_new_tokens=2, temperature=0.0)), lambda _output: None)
    loop.run_until_idle()
