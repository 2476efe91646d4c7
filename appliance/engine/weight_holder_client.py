"""An engine's side of a weight holder: wait for it, map what it holds, check it where it lies, or load without it.

Whatever is wrong with a holder costs a load from the files and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from appliance.core.units import format_bytes
from appliance.engine.models.decoder import Decoder
from appliance.engine.models.int8_decoder import Int8Decoder
from appliance.engine.models.registry import read_config
from appliance.engine.weight_holder_block import Entry, Manifest, damaged, model_digest
from appliance.engine.weight_holder_layout import decoder_over, stack_key
from appliance.engine.weight_holder_memory import map_block
from appliance.engine.weights import read_config_json

GIVES_UP_S = 5.0
"""How long a holder has to be gone that was told that its block is refused. Its memory may be wanted for what is loaded instead."""
_PACKET_BYTES = 65536
_FDS_MAX = 4

log = logging.getLogger("appliance.engine.weight_holder_client")


class Refused(Exception):
    """What is held cannot be served from; says why."""


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """Tensors in a holder's block; implements models.decoder.Weights.

    Attributes:
        holder: the connection; it ends when the holder does.
    """

    manifest: Manifest
    block: Tensor
    holder: socket.socket
    entries: dict[str, Entry]

    def has(self, name: str) -> bool:
        """Whether the decoder that it was laid out for asked for it."""
        return name in self.entries or any(name in key.split(" ") for key in self.entries)

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A view of the block. Raises Refused."""
        return self.tensor(name, shape, torch.float32)

    def stacked(self, names: tuple[str, ...], rows: tuple[int, ...], columns: int) -> Tensor:
        """As `get`."""
        return self.tensor(stack_key(names), (sum(rows), columns), torch.float32)

    def tensor(self, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """As `get`."""
        entry = self.entries.get(key)
        if entry is None or entry.shape != shape or entry.dtype != str(dtype).removeprefix("torch."):
            raise Refused(f"it holds no {key} of {list(shape)} in {dtype}")
        return self.block[entry.begin : entry.begin + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def check(self) -> None:
        """On the device, all of it. Raises Refused, with the first names of what is damaged."""
        began_s = time.monotonic()
        wrong = damaged(self.block, self.manifest)
        if wrong:
            raise Refused(f"{len(wrong)} of its {len(self.entries)} tensors are not what was read from the files, the first is {wrong[0]}")
        log.info("The held weights are checked. bytes=%d elapsed=%.3f s", self.block.nbytes, time.monotonic() - began_s)

    def refuse(self, why: Refused) -> None:
        """Say so, and wait until the holder and its memory are gone."""
        log.warning("The held weights are refused: %s. They are loaded from the files.", why)
        with contextlib.suppress(OSError):
            self.holder.send(json.dumps({"refused": str(why)}).encode())
            self.holder.settimeout(GIVES_UP_S)
            while self.holder.recv(_PACKET_BYTES):
                pass
        self.holder.close()


def hold(socket_path: str, model_path: Path) -> HeldWeights | None:
    """What the holder holds, unchecked, once it has loaded it; None, with a line in the log: there is nothing to be had."""
    holder = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        holder.connect(socket_path)
        said, fds = _await(holder)
        try:
            manifest = Manifest.decode(_read(fds[0]))
            block = map_block(said["memory"], manifest.block_bytes, said["ticket"], fds[1:])
        finally:
            for fd in fds:
                os.close(fd)
        return HeldWeights(manifest, block, holder, {entry.key: entry for entry in manifest.entries})
    except (OSError, ValueError, KeyError, IndexError) as error:
        why = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        log.warning("No weights are held for %s: %s. They are loaded from the files.", model_path, why)
        holder.close()
        return None


def held_decoder(
    socket_path: str, model_path: Path, weights_dtype: str = "float32"
) -> tuple[Decoder | Int8Decoder, HeldWeights] | tuple[None, None]:
    """Over what is held, checked; nothing where nothing can be had, or it was refused.

    Args:
        weights_dtype: as in EngineSettings.

    Raises:
        ModelError: the folder is missing, half-written, or not of a kind that the engine serves.
    """
    config = read_config(read_config_json(model_path))
    held = hold(socket_path, model_path)
    if held is None or not is_good(held, model_path):
        return None, None
    try:
        return decoder_over(held, model_path, config, weights_dtype), held
    except Refused as why:
        held.refuse(why)
        return None, None


def is_good(held: HeldWeights, model_path: Path) -> bool:
    """Whether it is of the files that lie there now, and whole. If not it was refused, and the log says why."""
    try:
        if held.manifest.model != model_digest(model_path):
            raise Refused(f"it was read from other files than lie in {model_path} now")
        held.check()
    except Refused as why:
        held.refuse(why)
        return False
    return True


def _await(holder: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The packet that says what is held. Waits as long as the holder lives; a stall is for applianced to see, by our silence.

    Raises:
        OSError: it is gone.
    """
    told_bytes = -1
    while True:
        data, fds, _flags, _address = socket.recv_fds(holder, _PACKET_BYTES, _FDS_MAX)
        if not data:
            raise ConnectionError("the holder ended before it had loaded them")
        said = json.loads(data)
        if "held" in said:
            return said, fds
        if said["loading"] != told_bytes:
            told_bytes = said["loading"]
            log.info("The holder loads. %s of %s", format_bytes(told_bytes), format_bytes(said["of"]))


def _read(fd: int) -> bytes:
    """All of a file whose position is shared with other readers."""
    return os.pread(fd, os.fstat(fd).st_size, 0)
