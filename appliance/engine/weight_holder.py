"""`python -m appliance.engine.weight_holder --model DIR`: a process that owns weights, so that an engine's end does not end them.

It computes nothing and serves no client, so there is little that it could die of. applianced starts it, with a listening unix socket
(SOCK_SEQPACKET) as standard input. Engines connect; one JSON object a packet:

    → {"loading": BYTES, "of": BYTES}                     while it loads, when there is something new
    → {"held": BYTES, "memory": KIND, "ticket": TEXT}     with the manifest, in a memfd, and then the block's descriptors
    ← {"refused": SENTENCE}                               the block is not what it must be: the holder gives it up and ends

A connection that ends, before or after, says that the holder has: docs/adr/0082-weight-holder.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import select
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

from appliance.core.errors import ModelError
from appliance.engine.settings import WEIGHTS_DTYPES
from appliance.engine.threads import settle_openmp, thread_count

EXIT_BAD_MODEL = 66
EXIT_REFUSED = 65
"""EX_DATAERR of sysexits.h."""
EXIT_NO_MEMORY = 71
"""EX_OSERR."""
EXIT_DEFECT = 70
HELD = "The weights are held."
"""How the line begins that applianced waits for."""
_PACKET_BYTES = 65536
_TELL_EVERY_S = 0.5

log = logging.getLogger("appliance.engine.weight_holder")


class WeightHolder:
    """Owns the block and the connections. A thread fills the block; everything else happens in `run`."""

    def __init__(self, listener: socket.socket, model_path: Path, weights_dtype: str, device: str, threads: int) -> None:
        self._listener = listener
        self._model_path = model_path
        self._weights_dtype = weights_dtype
        self._device = device
        self._threads = threads
        self._users: list[socket.socket] = []
        self._done_bytes, self._told_bytes, self._all_bytes = 0, -1, 0
        self._answer: tuple[bytes, tuple[int, ...]] | None = None
        self._filled, self._fills = socket.socketpair()

    def run(self) -> NoReturn:
        """Until it is killed, or told that what it holds is damaged."""
        threading.Thread(target=self._load, name="load", daemon=True).start()
        while True:
            loading = self._answer is None
            readable, _, _ = select.select([self._listener, self._filled, *self._users], [], [], _TELL_EVERY_S if loading else None)
            for ready in readable:
                if ready is self._listener:
                    self._admit()
                elif ready is self._filled:
                    self._filled.recv(1)
                    for user in tuple(self._users):
                        self._tell(user)
                else:
                    self._hear(ready)
            if loading and self._done_bytes != self._told_bytes:
                self._told_bytes = self._done_bytes
                for user in tuple(self._users):
                    self._tell(user)

    def _admit(self) -> None:
        user, _ = self._listener.accept()
        self._users.append(user)
        self._tell(user)

    def _tell(self, user: socket.socket) -> None:
        progress = json.dumps({"loading": self._done_bytes, "of": self._all_bytes}).encode()
        data, fds = self._answer or (progress, ())
        try:
            socket.send_fds(user, [data], fds, socket.MSG_DONTWAIT)
        except OSError:  # it died, or listens no more
            self._forget(user)

    def _hear(self, user: socket.socket) -> None:
        said = b""
        with contextlib.suppress(OSError):
            said = user.recv(_PACKET_BYTES)
        if not said:
            self._forget(user)
            return
        log.error("The weights are given up because %s", json.loads(said)["refused"])
        _end(EXIT_REFUSED)

    def _forget(self, user: socket.socket) -> None:
        if user in self._users:
            self._users.remove(user)
            user.close()

    def _load(self) -> None:
        from appliance.engine.weight_holder_memory import NoMemory

        try:
            self._answer = self._hold()
            self._fills.send(b"!")
        except ModelError as error:
            log.error("ModelError: %s", error)
            _end(EXIT_BAD_MODEL)
        except NoMemory as error:
            log.error("The weights cannot be held: %s", error)
            _end(EXIT_NO_MEMORY)
        except Exception:  # not to be lost in a thread while the process looks healthy
            log.exception("The weight holder failed in a way that nobody foresaw; please report this")
            _end(EXIT_DEFECT)

    def _hold(self) -> tuple[bytes, tuple[int, ...]]:
        """Load; what every user is told."""
        import torch

        from appliance.engine import weight_holder_block as blocks
        from appliance.engine.models.registry import read_config
        from appliance.engine.weight_holder_layout import pieces_of
        from appliance.engine.weight_holder_memory import CudaMemory, SharedMemory
        from appliance.engine.weights import ModelWeights, read_config_json

        torch.set_num_threads(self._threads)
        began_s, model = time.monotonic(), blocks.model_digest(self._model_path)
        config, weights = read_config(read_config_json(self._model_path)), ModelWeights(self._model_path)
        pieces = pieces_of(self._model_path, config, weights, self._weights_dtype)
        self._all_bytes = blocks.block_bytes(pieces)
        log.info("Load weight begin. model=%s bytes=%d device=%s", self._model_path, self._all_bytes, self._device)
        memory = SharedMemory(self._all_bytes) if self._device == "cpu" else CudaMemory(self._all_bytes, self._device)
        manifest = blocks.fill(memory.block, pieces, model, self._loaded)
        if blocks.model_digest(self._model_path) != model:
            raise ModelError(f"files of {self._model_path} were changed while they were read", hint="the next start reads them again")
        self._memory = memory  # for as long as this process lives
        said: dict[str, Any] = {"held": self._all_bytes, "memory": memory.kind, "ticket": memory.ticket()}
        log.info("%s bytes=%d memory=%s elapsed=%.2f s", HELD, self._all_bytes, memory.kind, time.monotonic() - began_s)
        return json.dumps(said).encode(), (_in_memory(manifest.encode()), *memory.fds())

    def _loaded(self, done_bytes: int) -> None:
        self._done_bytes = done_bytes


def _in_memory(data: bytes) -> int:
    fd = os.memfd_create("llm-appliance-manifest", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    return fd


def _end(code: int) -> NoReturn:
    logging.shutdown()
    os._exit(code)


def main() -> NoReturn:
    """The process."""
    parser = argparse.ArgumentParser(prog="python -m appliance.engine.weight_holder", description="Keep a model's weights in memory.")
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="folder with config.json and *.safetensors")
    parser.add_argument("--weights-dtype", choices=WEIGHTS_DTYPES, default="float32", help="as the engine's (default: float32)")
    parser.add_argument("--device", default="cpu", metavar="NAME", help="cpu: shared memory; cuda:N: that card's (default: cpu)")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="CPU threads; 0: one a core (default: 0)")
    arguments = parser.parse_args()
    from appliance.engine.__main__ import configure_evidence

    configure_evidence()
    try:
        listener = socket.socket(fileno=os.dup(0))
        listener.getsockname()
    except OSError as error:
        parser.exit(2, f"the weight holder is for applianced: standard input is no listening socket ({error.strerror})\n")
    settle_openmp()
    threads = thread_count(arguments.threads)
    WeightHolder(listener, arguments.model, arguments.weights_dtype, arguments.device, threads).run()


if __name__ == "__main__":
    sys.exit(main())
