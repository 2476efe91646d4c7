"""Weights that another process holds: the same numbers bit for bit, checked before they are used, and done without where they are wrong."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from appliance.engine.build import load_decoder
from appliance.engine.models.decoder import Decoder
from appliance.engine.models.int8_decoder import why_not
from appliance.engine.models.packed import load_packed
from appliance.engine.models.registry import read_config
from appliance.engine.weight_holder import EXIT_BAD_MODEL, EXIT_REFUSED
from appliance.engine.weight_holder_block import PAGE_BYTES, Manifest, block_bytes, checksum, fill, model_digest
from appliance.engine.weight_holder_client import HeldWeights, Refused, held_decoder, is_good
from appliance.engine.weight_holder_layout import decoder_over, pieces_of
from appliance.engine.weight_holder_memory import CudaMemory, NoMemory, SharedMemory, map_block
from appliance.engine.weights import ModelWeights, read_config_json
from appliance_kernels.x86.library import library
from tests.engine.driver import Driver, differences
from tests.engine.test_tiny_models import CASES, SIZES, prompt, save_checkpoint

ROOT = Path(__file__).parents[2]
PROMPTS = {"short": prompt(5, 5), "long": prompt(70, 70)}
KV_POOL_BYTES = 4 * 1024**2


class Holder:
    """A real one, as applianced starts it."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.socket = folder / "weights.sock"
        self.log = folder / "holder.log"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, self.log.open("w") as log:
            listener.bind(str(self.socket))
            listener.listen(4)
            command = [sys.executable, "-m", "appliance.engine.weight_holder", "--model", str(model), "--threads", "1"]
            self.process = subprocess.Popen(command, stdin=listener, stderr=log, cwd=ROOT)

    def flip_a_bit(self, at: int) -> None:
        """In the block, behind everybody's back."""
        for link in Path(f"/proc/{self.process.pid}/fd").iterdir():
            if "llm-appliance-weights" in str(link.readlink()):
                fd = os.open(link, os.O_RDWR)
                os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 4]), at)
                os.close(fd)
                return
        raise AssertionError("it holds no block")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stored in bfloat16, so that an engine alone would have to convert all of it."""
    return save_checkpoint(CASES["qwen2"](), tmp_path_factory.mktemp("held") / "model", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def holder(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Holder]:
    """One for all tests of this file; the last of them is its end."""
    one = Holder(tmp_path_factory.mktemp("holder"), model)
    yield one
    one.process.kill()
    one.process.wait()


def answers(model: Path, holder: Path | str = "") -> dict[str, Any]:
    """Of an engine of its own."""
    return Driver(model, threads=1, kv_pool_bytes=KV_POOL_BYTES, weight_holder=str(holder)).run(PROMPTS)


def in_memory(model: Path, dtype: str = "float32") -> tuple[HeldWeights, socket.socket]:
    """What a holder would hold, without its process; and the holder's end of the connection."""
    weights = ModelWeights(model)
    pieces = pieces_of(model, read_config(read_config_json(model)), weights, dtype)
    block = torch.zeros(block_bytes(pieces), dtype=torch.uint8)
    manifest = fill(block, pieces, model_digest(model), lambda _done: None)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return HeldWeights(manifest, block, ours, {entry.key: entry for entry in manifest.entries}), theirs


@pytest.mark.parametrize("case", CASES)
def test_what_is_held_is_what_a_decoder_of_any_family_asks_for(case: str, tmp_path: Path) -> None:
    """Every tensor, bit for bit; the manifest survives its way."""
    folder = save_checkpoint(CASES[case](), tmp_path, dtype=torch.float16)
    held, _theirs = in_memory(folder)
    held = replace(held, manifest=Manifest.decode(held.manifest.encode()))
    held.check()
    config = read_config(read_config_json(folder))
    ours, right = Decoder(config, held), Decoder(config, ModelWeights(folder))
    layers = zip(ours._layers, right._layers, strict=True)
    found = [(getattr(one, name), getattr(other, name)) for one, other in layers for name in one.__slots__]
    found += [(ours._embedding, right._embedding), (ours._norm, right._norm), (ours._head, right._head)]
    assert all(b is None if a is None else torch.equal(a, b) for a, b in found)


@pytest.mark.skipif(library() is None, reason="no compiled library of ours runs on this processor")
def test_quantised_weights_are_held_in_our_own_layout(tmp_path: Path) -> None:
    """As one piece, so that nothing is packed again; a decoder over it says the same. What cannot be had in 8 bits is held in 32."""
    sizes = SIZES | {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    folder = save_checkpoint(transformers.LlamaConfig(**sizes), tmp_path, dtype=torch.bfloat16)
    config = read_config(read_config_json(folder))
    assert why_not(config) is None
    held, _theirs = in_memory(folder, "int8")
    held.check()
    (entry,) = held.entries.values()
    assert entry.dtype == "uint8"
    ours, right = decoder_over(held, folder, config, "int8"), load_decoder(folder, weights_dtype="int8")
    hidden = torch.randn(2, 128, generator=torch.Generator().manual_seed(3))
    assert torch.equal(ours.logits(hidden.clone()), right.logits(hidden.clone()))
    packed = load_packed(folder, config, ModelWeights(folder)).memory
    assert torch.equal(held.tensor(entry.key, entry.shape, torch.uint8), packed)
    other = save_checkpoint(CASES["llama-tied-odd-heads"](), tmp_path / "other")
    assert "model.embed_tokens.weight" in in_memory(other, "int8")[0].entries


def test_an_engine_answers_the_same_from_held_weights(model: Path, holder: Holder) -> None:
    """To the last bit of every logit, without a byte of the weights in memory of its own; several engines at a time."""
    right = answers(model)
    assert not differences(right, answers(model, holder.socket))
    held = [held_decoder(str(holder.socket), model)[1] for _ in range(2)]
    assert all(held)
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "llm-appliance-weights" in line]
    assert len(maps) >= 2
    assert {line.split()[1] for line in maps} == {"r--s"}, "shared, and nobody of us can write to it"


def test_an_engine_that_is_killed_leaves_what_is_held_to_the_next_one(model: Path, holder: Holder) -> None:
    """kill -9 of a process that has mapped it: the next maps the same memory, and it is whole."""
    code = (
        "import sys, pathlib; from appliance.engine.weight_holder_client import held_decoder\n"
        "found = held_decoder(sys.argv[1], pathlib.Path(sys.argv[2])); assert found[0] is not None\n"
        "maps = pathlib.Path('/proc/self/maps').read_text().splitlines()\n"
        "print(next(line.split()[4] for line in maps if 'llm-appliance-weights' in line), flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(holder.socket), str(model)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as engine:
        assert engine.stdout is not None
        inode = engine.stdout.readline().strip()
        engine.send_signal(signal.SIGKILL)
    _decoder, held = held_decoder(str(holder.socket), model)
    assert held is not None
    assert inode in {line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines() if "llm-appliance-weights" in line}


def test_one_flipped_bit_is_found_and_the_weights_are_loaded_from_the_files(
    model: Path, holder: Holder, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine that has mapped them finds it when it looks again, as a spare does; the holder gives the memory back before it loads."""
    right = answers(model)
    _decoder, held = held_decoder(str(holder.socket), model)
    assert held is not None
    victim = held.manifest.entries[7]
    holder.flip_a_bit(victim.begin + 101)
    with pytest.raises(Refused, match=f"1 of its {len(held.entries)} tensors .* the first is {victim.key}"):
        held.check()
    with caplog.at_level(logging.INFO):
        assert not differences(right, answers(model, holder.socket))
    refusal = next(at for at, record in enumerate(caplog.records) if "refused" in record.message)
    assert "They are loaded from the files." in caplog.records[refusal].message
    assert "Load weight begin." in caplog.records[refusal + 1].message
    assert holder.process.wait(10) == EXIT_REFUSED
    assert f"given up because 1 of its {len(held.entries)} tensors" in holder.log.read_text()
    with caplog.at_level(logging.INFO):
        assert not differences(right, answers(model, holder.socket)), "nobody listens: loaded from the files at once"
    assert "No weights are held" in caplog.text


def test_other_files_are_not_served_from(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The folder was written since: refused, and the holder is told."""
    held, theirs = in_memory(model)
    os.utime(model / "config.json", (1, 1))
    threading.Thread(target=lambda: (theirs.recv(4096), theirs.close())).start()
    assert not is_good(held, model)
    assert "read from other files than lie in" in caplog.text


@pytest.mark.parametrize("said", [b"", b'{"held": 4096, "memory": "shared", "ticket": ""}', b"nonsense", b'{"held": 1}'])
def test_a_holder_that_dies_or_talks_nonsense_costs_a_load(said: bytes, model: Path, tmp_path: Path) -> None:
    """Whatever it said before it died."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(tmp_path / "s"))
    listener.listen(1)

    def answer() -> None:
        user, _ = listener.accept()
        user.send(b'{"loading": 0, "of": 9}')
        if said:
            user.send(said)
        user.close()

    threading.Thread(target=answer).start()
    assert held_decoder(str(tmp_path / "s"), model) == (None, None)
    listener.close()


def test_a_holder_of_a_bad_folder_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And ends, so that the engine that waits for it loads by itself and says the same. While it waits it says how far the holder is:
    applianced would take its silence for a stall."""
    save_checkpoint(CASES["llama"](), tmp_path / "bad")
    file = tmp_path / "bad" / "model.safetensors"
    tensors = load_file(file)
    tensors.pop("model.norm.weight")
    save_file(tensors, file)
    one = Holder(tmp_path, tmp_path / "bad")
    with caplog.at_level(logging.INFO):
        assert held_decoder(str(one.socket), tmp_path / "bad") == (None, None)
    assert "The holder loads. 0 B of" in caplog.text
    assert "the holder ended before it had loaded them" in caplog.text
    assert one.process.wait(30) == EXIT_BAD_MODEL
    assert "ModelError: the checkpoint has no tensor model.norm.weight" in one.log.read_text()


def test_the_shared_block_can_neither_be_written_nor_cut_by_who_maps_it() -> None:
    """Its descriptor is read-only, its size is sealed."""
    memory = SharedMemory(2 * PAGE_BYTES)
    memory.block[5] = 7
    (fd,) = memory.fds()
    assert map_block("shared", 2 * PAGE_BYTES, "", [fd])[5] == 7
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(fd, b"x", 0)
    with pytest.raises(ValueError, match=r"no block of 12\.00 KiB"):
        map_block("shared", 3 * PAGE_BYTES, "", [fd])
    with pytest.raises(OSError, match="Operation not permitted"):
        os.truncate(f"/proc/self/fd/{memory._fd}", PAGE_BYTES)


def test_what_cannot_be_held_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """More memory than there is, an allocator whose memory has no IPC handle, no card."""
    with pytest.raises(NoMemory, match=r"it takes .* of memory, and .* are available"):
        SharedMemory(2**55)
    if not torch.cuda.is_available():
        with pytest.raises(NoMemory, match="this torch finds no card"):
            CudaMemory(PAGE_BYTES, "cuda:0")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:native, expandable_segments:True")
    with pytest.raises(NoMemory, match="no IPC handle"):
        CudaMemory(PAGE_BYTES, "cuda:0")


def test_a_manifest_of_another_version_is_refused() -> None:
    """By its format, or because something is missing in it."""
    good = json.loads(Manifest("m", 4096, ()).encode())
    for bad in (good | {"format": 99}, {"format": 1}, []):
        with pytest.raises(ValueError, match="its manifest"):
            Manifest.decode(json.dumps(bad).encode())


def test_the_checksum_sees_any_bit_and_any_two_pages_that_changed_places() -> None:
    """Formula: SHA-256 of the pages' sums, in order."""
    pages = torch.randint(0, 256, (3 * PAGE_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    right = checksum(pages)
    for at in (0, 4095, 4096, 12287):
        for bit in (1, 128):
            pages[at] ^= bit
            assert checksum(pages) != right
            pages[at] ^= bit
    assert checksum(torch.cat((pages[PAGE_BYTES : 2 * PAGE_BYTES], pages[:PAGE_BYTES], pages[2 * PAGE_BYTES :]))) != right
    assert checksum(pages) == right


def test_it_is_not_for_a_terminal() -> None:
    """Without a listening socket: one sentence, and the exit code of a command line."""
    done = subprocess.run(
        [sys.executable, "-m", "appliance.engine.weight_holder", "--model", "x"], stdin=subprocess.DEVNULL, capture_output=True, cwd=ROOT
    )
    assert done.returncode == 2
    assert b"the weight holder is for applianced" in done.stderr
