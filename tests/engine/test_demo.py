"""Bringing a model out of wheels: idempotent, resumable, and honest about what went wrong."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import psutil
import pytest
from tokenizers import Tokenizer

from appliance.core.errors import ApplianceError
from appliance.engine import demo
from appliance.engine.convert import finished
from appliance.engine.demo import SMOLLM2, PackagedModel, bring
from tests.engine.tiny_gguf import LLAMA, write_gguf
from tests.fakes.small_disk import NEEDS_ROOT, fill, small_disk


class Shelf:
    """Wheels with a tiny GGUF cut in two, and the model that names them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        source = write_gguf(folder / "tiny.gguf", folder / "original", LLAMA, gguf.GGMLQuantizationType.F32)
        content = source.read_bytes()
        half = len(content) // 2
        self.wheels = folder / "wheels"
        self.wheels.mkdir()
        for part, piece in (("1", content[:half]), ("2", content[half:])):
            self._wheel(part, piece)
        self.model = PackagedModel(
            "tiny", ("tiny-part1==1.0", "tiny-part2==1.0"), "*.gguf.part?", len(content), hashlib.sha256(content).hexdigest(), 1 << 20
        )
        self.models, self.log = folder / "models", folder / "log"
        for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.wheels), "PIP_CONFIG_FILE": "/dev/null"}.items():
            monkeypatch.setenv(name, value)

    def _wheel(self, part: str, piece: bytes) -> None:
        name = f"tiny_part{part}"
        with zipfile.ZipFile(self.wheels / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            info = f"{name}-1.0.dist-info"
            wheel.writestr(f"{name}/tiny.gguf.part{part}", piece)
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-part{part}\nVersion: 1.0\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")

    def bring(self) -> Path:
        """As the command does; what it says goes to `log`."""
        with self.log.open("w") as stream:
            return bring(self.model, self.models, stream)


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    """A package index of two wheels."""
    return Shelf(tmp_path, monkeypatch)


def test_parts_are_fetched_joined_and_converted_once(shelf: Shelf) -> None:
    """Nothing but the model folder is left; the second time nothing is done."""
    folder = shelf.bring()
    assert finished(folder) is not None
    assert [path.name for path in shelf.models.iterdir() if path.is_dir()] == ["tiny"]
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    for wheel in shelf.wheels.iterdir():
        wheel.unlink()
    assert shelf.bring() == folder
    assert shelf.log.read_text() == f"{folder} is there.\n"
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp


def test_without_a_network_it_says_what_to_do(shelf: Shelf) -> None:
    """pip's own reason, and where a wheel can be put by hand; and then it goes on from there."""
    wheel = shelf.wheels / "tiny_part2-1.0-py3-none-any.whl"
    kept = wheel.read_bytes()
    wheel.unlink()
    with pytest.raises(
        ApplianceError, match=r"cannot fetch tiny-part2==1\.0: .*put the wheel into .*\.tiny\.download, and run it again"
    ) as failure:
        shelf.bring()
    assert "Could not find a version that satisfies the requirement tiny-part2" in str(failure.value)
    (shelf.models / ".tiny.download" / wheel.name).write_bytes(kept)
    assert finished(shelf.bring()) is not None
    assert "tiny-part1" not in shelf.log.read_text(), "what was fetched is not fetched again"


def test_another_file_than_the_one_we_know_is_refused_and_forgotten(shelf: Shelf) -> None:
    """Both hashes are named; the next run fetches anew."""
    good = shelf.model
    shelf.model = dataclasses.replace(good, sha256="0" * 64)
    with pytest.raises(ApplianceError, match=f"is not the one we know: sha256 {good.sha256}, expected 0000"):
        shelf.bring()
    shelf.model = good
    assert finished(shelf.bring()) is not None


def test_a_damaged_wheel_is_fetched_again(shelf: Shelf) -> None:
    """What pip left half-written by a power cut, say."""
    work = shelf.models / ".tiny.download"
    work.mkdir(parents=True)
    (work / "tiny_part1-1.0-py3-none-any.whl").write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(ApplianceError, match=r"tiny_part1-1\.0-py3-none-any\.whl cannot be unpacked.*run this again"):
        shelf.bring()
    assert finished(shelf.bring()) is not None


def test_too_little_disk_is_said_before_anything_is_fetched(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """With both numbers: of wheels, file and folder together, less what is there already."""
    monkeypatch.setattr(demo.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1024})())
    with pytest.raises(ApplianceError, match=r"not enough disk space in .*: download and conversion need 1\..* MiB, 1\.00 KiB are free"):
        shelf.bring()
    work = shelf.models / ".tiny.download"
    work.mkdir()
    (work / "tiny.gguf").write_bytes(b"x" * shelf.model.size_bytes)
    with pytest.raises(ApplianceError, match=r"download and conversion need 1\.00 MiB, 1\.00 KiB are free"):
        shelf.bring()


def test_a_rotten_byte_is_found_and_the_model_brought_again(shelf: Shelf) -> None:
    """Same size, another content: sizes alone would not tell."""
    weights = shelf.bring() / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert finished(weights.parent) is None
    shelf.bring()
    assert weights.read_bytes() == good


@NEEDS_ROOT
def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    """Not a byte of room for the folder, for real: code 1, what and where, no traceback."""
    with small_disk(tmp_path / "disk") as disk:
        fill(disk)
        command = [sys.executable, "-m", "appliance.engine.demo", str(disk / "models")]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: "), ended.stderr
    assert str(disk / "models") in ended.stderr
    assert "Traceback" not in ended.stderr


def test_no_pip_outlives_a_setup_that_was_killed(shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kill -9 of `appliancectl setup`: its child and that one's pip go with it."""
    fifo = tmp_path / "pip.conf"
    os.mkfifo(fifo)  # pip waits for somebody to write its configuration
    monkeypatch.setenv("PIP_CONFIG_FILE", str(fifo))
    command = [sys.executable, "-m", "appliance.cli", "--state-dir", str(tmp_path / "state"), "setup", "--demo", "--no-config"]
    setup = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        below = _until(lambda: [pid for pid in psutil.Process(setup.pid).children(recursive=True) if "pip" in pid.cmdline()])
        every = psutil.Process(setup.pid).children(recursive=True)
    finally:
        setup.kill()
        setup.wait()
    assert below
    _until(lambda: not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in every))


def _until(condition: Callable[[], Any]) -> Any:
    deadline_s = time.monotonic() + 30
    while not (value := condition()):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    return value


def test_the_command_line_says_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline: code 1, the reason, no traceback."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    command = [sys.executable, "-m", "appliance.engine.demo", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith(f"error: cannot fetch {SMOLLM2.requirements[0]}: ")
    assert "Traceback" not in ended.stderr


# Token ids as transformers 5.24 gives them from the same GGUF files (compared on 35 texts when this was written).
SMOLLM2_TEXTS = {
    "Hello world": [19556, 905],
    "The year 2024 had 366 days; 3.14159": [504, 713, 216, 34, 32, 34, 36, 761, 216, 35, 38, 38, 2009, 43, 216, 35, 30, 33, 36, 33, 37, 41],
    "我能吞下玻璃而不伤身体。": [
        19805, 235, 47093, 16357, 248, 42080, 40072, 136, 178, 236, 221, 39648, 230, 30229, 29836, 114, 179, 135, 121, 18645, 237, 19076,
    ],
    "don't <|im_start|>user\nhi<|im_end|>": [12420, 982, 216, 1, 4093, 198, 6004, 2],
    "  leading   and    many     spaces  ": [216, 2899, 256, 284, 333, 800, 289, 5600, 256],
}  # fmt: skip
GEMMA3_TEXTS = {
    "Hello world": [2, 9259, 1902],
    "Zwölf Boxkämpfer": [2, 141536, 188371, 9622, 55281, 2720, 821],
    "我能吞下玻璃而不伤身体。": [2, 237169, 237230, 241915, 237245, 75677, 107531, 239499, 39388, 236924],
    "a\r\nb\r\n\r\nc": [2, 236746, 251, 107, 236763, 251, 107, 251, 107, 236755],
    "  leading   and    many     spaces  ": [2, 138, 26016, 139, 624, 140, 34717, 141, 35220, 138],
    "\n\n\n# end\t\ttabs": [2, 109, 236865, 1345, 255969, 39218],
}


@pytest.mark.model
@pytest.mark.parametrize(("model", "texts"), [("smollm2", SMOLLM2_TEXTS), ("gemma3", GEMMA3_TEXTS)])
def test_real_tokenizers_cut_as_transformers_does(model: str, texts: dict[str, list[int]], request: pytest.FixtureRequest) -> None:
    """Digits, scripts, bytes, runs of spaces and lines, special tokens; and decoding gives the text back."""
    tokenizer = Tokenizer.from_file(str(request.getfixturevalue(model) / "tokenizer.json"))
    for text, ids in texts.items():
        assert tokenizer.encode(text).ids == ids
        assert tokenizer.decode(ids, skip_special_tokens=False).removeprefix("<bos>") == text


@pytest.mark.model
def test_the_demo_model_brings_its_chat_template_and_end_token(smollm2: Path) -> None:
    """So that chat works out of the box."""
    config = json.loads((smollm2 / "tokenizer_config.json").read_text())
    assert "<|im_start|>" in config["chat_template"]
    assert config["eos_token"] == "<|im_end|>"
    assert json.loads((smollm2 / "generation_config.json").read_text())["eos_token_id"] == [2]
