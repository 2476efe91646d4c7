"""GGUF to model folder: the numbers, the tokenizer, and what happens when it is interrupted, doubled or given nonsense."""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import torch
from tokenizers import Tokenizer

from appliance.core.errors import ApplianceError, ModelError
from appliance.engine import convert as converter
from appliance.engine.convert import convert, finished
from appliance.engine.gguf_file import GgufFile, check_readable
from appliance.engine.gguf_model import llama3_scaling
from appliance.engine.gguf_tokenizer import build_tokenizer, merges_from_scores, tokenizer_config
from appliance.engine.progress import Progress
from appliance.engine.weights import ModelWeights, read_config_json
from tests.engine.driver import Driver
from tests.engine.oracle import Oracle, relative_error
from tests.engine.test_tiny_models import prompt
from tests.engine.tiny_gguf import GEMMA3, LLAMA, LLAMA3, QWEN2, QWEN3, write_gguf

F32, F16, Q8_0 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.Q8_0
CONFIGS = {"llama": LLAMA, "llama3-biased": LLAMA3, "qwen2-yarn": QWEN2, "qwen3": QWEN3, "gemma3": GEMMA3}


def quiet() -> io.StringIO:
    """Somewhere for progress to go."""
    return io.StringIO()


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    """A small Llama in float32."""
    return write_gguf(tmp_path / "tiny.gguf", tmp_path / "original", LLAMA, F32)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_float32_file_becomes_the_model_it_was_made_from(architecture: str, tmp_path: Path) -> None:
    """Every tensor, to the last bit where nothing was added or taken; and transformers reads the folder as the same model."""
    source = write_gguf(tmp_path / "m.gguf", tmp_path / "original", CONFIGS[architecture], F32)
    convert(source, tmp_path / "converted", quiet())
    original, ours = ModelWeights(tmp_path / "original"), ModelWeights(tmp_path / "converted")
    assert original._places.keys() == ours._places.keys()
    for name, place in original._places.items():
        a, b = original.get(name, place.shape), ours.get(name, place.shape)
        assert torch.allclose(a, b, atol=1e-6) if "norm" in name else torch.equal(a, b), name
    ids = [token % 300 for token in prompt(60)]
    judged = Oracle(tmp_path / "original").logits(ids)
    assert relative_error(Oracle(tmp_path / "converted").logits(ids), judged) < 1e-5
    answer = Driver(tmp_path / "converted", kv_pool_bytes=8 * 1024**2).run({"a": ids})["a"]
    assert relative_error(answer.logits[60], judged[-1]) < 1e-5


@pytest.mark.parametrize("kind", [F16, Q8_0], ids=["f16", "q8_0"])
def test_quantised_files_are_decoded(kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    """Close to the original, and exactly what the gguf package's decoder gives, also cut into pieces."""
    source = write_gguf(tmp_path / "m.gguf", tmp_path / "original", LLAMA, kind)
    pieces = converter._PIECE_BYTES
    try:
        converter._PIECE_BYTES = 4096
        convert(source, tmp_path / "converted", quiet())
    finally:
        converter._PIECE_BYTES = pieces
    original, ours = ModelWeights(tmp_path / "original"), ModelWeights(tmp_path / "converted")
    for name, place in original._places.items():
        a, b = original.get(name, place.shape), ours.get(name, place.shape)
        assert torch.allclose(a, b, atol=0.02), name
    file = GgufFile(source)
    tensor = file.tensors["blk.1.ffn_down.weight"]
    decoded = torch.from_numpy(gguf.dequantize(tensor.data, tensor.kind))
    assert torch.equal(decoded, ours.get("model.layers.1.mlp.down_proj.weight", (64, 96)))


def test_what_is_read_together_lies_together(tiny_gguf: Path, tmp_path: Path) -> None:
    """q, k, v and gate, up are one view of the file, aligned to a cache line: nothing is copied at start."""
    convert(tiny_gguf, tmp_path / "converted", quiet())
    weights = ModelWeights(tmp_path / "converted")
    names = tuple(f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv")
    stacked = weights.stacked(names, (64, 32, 32), 64)
    assert torch.equal(stacked[64:96], weights.get(names[1], (32, 64)))
    assert stacked.data_ptr() == weights.get(names[0], (64, 64)).data_ptr()
    assert stacked.data_ptr() % 64 == 0


def test_the_tokenizer_keeps_ids_merges_and_special_tokens(tiny_gguf: Path, tmp_path: Path) -> None:
    """Byte-level BPE with SmolLM's single digits; control tokens are special, user-defined ones are not."""
    convert(tiny_gguf, tmp_path / "converted", quiet())
    tokenizer = Tokenizer.from_file(str(tmp_path / "converted" / "tokenizer.json"))
    fields = GgufFile(tiny_gguf).fields
    vocabulary = fields["tokenizer.ggml.tokens"]
    assert [tokenizer.id_to_token(index) for index in range(len(vocabulary))] == vocabulary
    assert tokenizer.encode("thecat42</s>").tokens == ["the", "cat", "4", "2", "</s>"]
    assert tokenizer.decode(tokenizer.encode("cat</s><extra0>").ids, skip_special_tokens=True) == "cat<extra0>"
    config = json.loads((tmp_path / "converted" / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"], config["model_max_length"]) == ("<s>", "</s>", 256)
    assert "chat_template" not in config
    assert json.loads((tmp_path / "converted" / "generation_config.json").read_text())["eos_token_id"] == [2]


def test_the_chat_template_comes_along(tmp_path: Path) -> None:
    """Word for word."""
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    source = write_gguf(tmp_path / "m.gguf", tmp_path / "o", LLAMA, F32, **{"tokenizer.chat_template": template})
    convert(source, tmp_path / "converted", quiet())
    assert json.loads((tmp_path / "converted" / "tokenizer_config.json").read_text())["chat_template"] == template


def by_scores(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's own rule, word for word: merge the neighbours whose union scores best, the leftmost of equals."""
    symbols = list(text)
    while True:
        pairs = [(scores[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in scores]
        if not pairs:
            return symbols
        at = -max(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


def test_merges_from_scores_cut_words_as_sentencepiece_does() -> None:
    """Against the definition, on thousands of random words over a random vocabulary."""
    generator = torch.Generator().manual_seed(5)

    def word(length: int) -> str:
        return "".join("abcd"[int(i)] for i in torch.randint(0, 4, (length,), generator=generator))

    pieces = list(dict.fromkeys([*"abcd", *(word(2 + i % 4) for i in range(120))]))
    order = torch.randperm(len(pieces), generator=generator).tolist()
    scores = {piece: -float(rank) for piece, rank in zip(pieces, order, strict=True)}
    merges = merges_from_scores(pieces, [1] * len(pieces), [scores[piece] for piece in pieces])
    from tokenizers import models

    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, merges))
    for index in range(2000):
        text = word(1 + index % 20)
        assert tokenizer.encode(text).tokens == by_scores(text, scores), text


def test_converting_again_is_instant_and_changes_nothing(tiny_gguf: Path, tmp_path: Path) -> None:
    """Unless the source is another one."""
    first = convert(tiny_gguf, tmp_path / "converted", quiet())
    weights = tmp_path / "converted" / "model.safetensors"
    stamp = weights.stat().st_mtime_ns
    said = quiet()
    assert convert(tiny_gguf, tmp_path / "converted", said) == first
    assert "already converted" in said.getvalue()
    assert weights.stat().st_mtime_ns == stamp
    other = write_gguf(tmp_path / "other.gguf", tmp_path / "o2", LLAMA, F16)
    assert convert(other, tmp_path / "converted", quiet()).source_name == "other.gguf"
    assert weights.stat().st_mtime_ns != stamp


def test_a_conversion_killed_half_way_leaves_nothing_that_loads_and_starts_over(tiny_gguf: Path, tmp_path: Path) -> None:
    """SIGKILL while it writes the weights: no folder under the name; the next run cleans up and finishes."""
    out = tmp_path / "converted"
    code = (
        "import os, sys, time\nfrom pathlib import Path\nfrom appliance.engine import convert as c\n"
        "real = c._pieces\n"
        "def slow(job):\n"
        "    for piece in real(job):\n        yield piece\n"
        "    if 'layers.1' in job.name: print('half', flush=True); time.sleep(60)\n"
        "c._pieces = slow\n"
        "c.convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.stderr)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tiny_gguf), str(out)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "half\n"
    with pytest.raises(ApplianceError, match=f"is running in another process \\(pid {child.pid}\\)"):
        convert(tiny_gguf, out, quiet())
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert not out.exists()
    assert (tmp_path / ".converted.partial" / "model.safetensors").exists()
    said = quiet()
    convert(tiny_gguf, out, said)
    assert "an interrupted conversion left" in said.getvalue()
    assert finished(out) is not None
    assert not (tmp_path / ".converted.partial").exists()


def test_a_folder_of_ours_that_was_damaged_is_refused_by_the_engine_and_made_anew(tiny_gguf: Path, tmp_path: Path) -> None:
    """A cut-off weight file is found by its size before it is mapped."""
    out = tmp_path / "converted"
    convert(tiny_gguf, out, quiet())
    os.truncate(out / "model.safetensors", 1000)
    with pytest.raises(ModelError, match=r"model\.safetensors is 1000 bytes, the manifest says \d+ bytes: the folder is damaged"):
        read_config_json(out)
    convert(tiny_gguf, out, quiet())
    assert read_config_json(out)["model_type"] == "llama"


def test_a_folder_that_is_not_ours_is_never_replaced(tiny_gguf: Path, tmp_path: Path) -> None:
    """Whatever lies in it stays."""
    out = tmp_path / "precious"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    with pytest.raises(ModelError, match="precious exists and was not made by this converter"):
        convert(tiny_gguf, out, quiet())
    assert (out / "thesis.txt").read_text() == "years of work"


def test_a_full_disk_is_found_before_anything_is_written(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what is needed and what is free."""
    monkeypatch.setattr(converter.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10 * 1024**2})())
    with pytest.raises(ApplianceError, match=r"needs 64\.\d\d MiB, 10\.00 MiB are free"):
        convert(tiny_gguf, tmp_path / "converted", quiet())
    assert not list(tmp_path.glob(".converted.partial"))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"general.architecture": "mamba"},
            "of architecture 'mamba', which is not converted; converted: llama, qwen2, qwen3, gemma3; .*engine.backend",
        ),
        ({"tokenizer.ggml.pre": "klingon"}, "cuts words the 'klingon' way"),
        ({"tokenizer.ggml.model": "rwkv"}, "tokenizer is of kind 'rwkv'"),
        (
            {"llama.rope.scaling.type": "longrope"},
            "rope scaling 'longrope', which is not converted; converted: linear, yarn; .*engine.backend",
        ),
        ({"llama.rope.scaling.type": "linear"}, "has no llama.rope.scaling.factor"),
        ({"llama.context_length": "long"}, "llama.context_length is 'long', expected int"),
        ({"llama.embedding_length": None}, "has no llama.embedding_length"),
    ],
)
def test_what_is_not_converted_is_named(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    """And nothing is left behind under the name."""
    architecture = fields.pop("general.architecture", None)
    source = write_gguf(tmp_path / "m.gguf", tmp_path / "original", LLAMA, F32, **fields)
    if architecture:
        content = source.read_bytes()
        at = content.index(b"llama", content.index(b"general.architecture"))
        source.write_bytes(content[:at] + architecture.encode() + content[at + 5 :])
    with pytest.raises(ModelError, match=words):
        convert(source, tmp_path / "converted", quiet())
    assert not (tmp_path / "converted").exists()


def test_a_rope_table_that_is_not_llama_3_s_is_named() -> None:
    """Its numbers would not come out again."""
    config = {"rope_theta": 500_000.0, "head_dim": 16}
    for table in ([1.0] * 7 + [8.0], [8.0] * 8, [1.0] * 4):
        with pytest.raises(ModelError, match=r"m\.gguf scales its rope by a table that is not Llama 3's"):
            llama3_scaling(numpy.array(table, dtype=numpy.float32), config, Path("m.gguf"))


def test_a_quantisation_that_cannot_be_decoded_is_named_before_anything_is_written(tiny_gguf: Path) -> None:
    """With one that can, and the engine that can."""
    tensor = GgufFile(tiny_gguf).tensors["blk.0.ffn_up.weight"]
    check_readable(tiny_gguf, [tensor])
    with pytest.raises(ModelError, match=r"tensor blk\.0\.ffn_up\.weight is quantised as Q8_K, which is not converted; .*Q4_K_M.*llamacpp"):
        check_readable(tiny_gguf, [replace(tensor, kind=gguf.GGMLQuantizationType.Q8_K)])


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"])
def test_what_most_files_are_quantised_as_can_be_decoded(kind: str, tiny_gguf: Path) -> None:
    """By the gguf package, block by block."""
    number = gguf.GGMLQuantizationType[kind]
    _, size = gguf.GGML_QUANT_SIZES[number]
    tensor = replace(GgufFile(tiny_gguf).tensors["blk.0.ffn_up.weight"], kind=number, data=numpy.zeros((1, size), numpy.uint8))
    check_readable(tiny_gguf, [tensor])


@pytest.mark.parametrize(
    ("fields", "begins"), [({}, False), ({"pre": "llama-bpe"}, True), ({"pre": "tekken", "add_bos_token": False}, False)]
)
def test_a_text_begins_with_bos_where_the_file_says_so_or_its_kind_does(fields: dict[str, Any], begins: bool, tiny_gguf: Path) -> None:
    """Llama 3's older files do not say it, and llama.cpp does it all the same."""
    metadata = {name: value for name, value in GgufFile(tiny_gguf).fields.items() if name != "tokenizer.ggml.add_bos_token"}
    metadata |= {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    assert build_tokenizer(metadata).encode("cat").tokens == ["<s>"] * begins + ["cat"]
    assert tokenizer_config(metadata, 100)["add_bos_token"] is begins


def test_damaged_files_are_named_not_crashed_on(tiny_gguf: Path, tmp_path: Path) -> None:
    """Cut off anywhere, empty, something else, or missing."""
    content = tiny_gguf.read_bytes()
    for size in (0, 3, 4, 10, 30, 500, 5000, len(content) // 2, len(content) - 1):
        broken = tmp_path / "broken.gguf"
        broken.write_bytes(content[:size])
        with pytest.raises(ModelError):
            convert(broken, tmp_path / "converted", quiet())
    broken.write_bytes(b"PK\x03\x04" + content[4:])
    with pytest.raises(ModelError, match="is no GGUF file"):
        convert(broken, tmp_path / "converted", quiet())
    broken.write_bytes(content[:4] + (9).to_bytes(4, "little") + content[8:])
    with pytest.raises(ModelError, match="is GGUF version 9; supported: 2, 3"):
        convert(broken, tmp_path / "converted", quiet())
    with pytest.raises(ModelError, match=r"missing\.gguf cannot be read: No such file"):
        convert(tmp_path / "missing.gguf", tmp_path / "converted", quiet())


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        ("llama", {"llama.attention.key_length": 0}, "head_dim is 0, expected a whole number of at least 1"),
        ("llama", {"llama.attention.key_length": 48}, "has 64 rows, no multiple of a head's 48"),
        ("qwen3", {"tokenizer.ggml.merges": ["no such", "c at"]}, "tokenizer does not fit together"),
    ],
)
def test_what_does_not_fit_together_is_refused_before_anything_is_written(
    kind: str, fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """By name, as a bit that has turned over may make it."""
    damaged = write_gguf(tmp_path / "damaged.gguf", tmp_path / "original", CONFIGS[kind], F32, **fields)
    with pytest.raises(ModelError, match=words):
        convert(damaged, tmp_path / "converted", quiet())
    assert not (tmp_path / "converted").exists()


def test_a_tensor_of_no_numbers_is_refused(tiny_gguf: Path, tmp_path: Path) -> None:
    """A dimension of zero."""
    content = bytearray(tiny_gguf.read_bytes())
    name = b"blk.0.ffn_gate.weight"
    at = content.index(name) + len(name) + 4
    content[at : at + 8] = bytes(8)
    (tmp_path / "empty.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=r"tensor blk\.0\.ffn_gate\.weight has the shape \(96, 0\): no numbers at all"):
        convert(tmp_path / "empty.gguf", tmp_path / "converted", quiet())


def test_the_command_line_converts_and_says_what_is_wrong(tiny_gguf: Path, tmp_path: Path) -> None:
    """The folder on stdout, progress on stderr, one sentence and code 1 for a bad file."""
    command = [sys.executable, "-m", "appliance.engine.convert"]
    ended = subprocess.run(
        [*command, str(tiny_gguf), str(tmp_path), "--name", "made"], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == f"{tmp_path / 'made'}\n"
    assert "Converting: 100%" in ended.stderr
    (tmp_path / "no.gguf").write_text("no")
    ended = subprocess.run(
        [*command, str(tmp_path / "no.gguf"), str(tmp_path / "x")], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in ended.stderr


def test_progress_is_lines_without_a_terminal_and_a_bar_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line every five seconds, the last with the time; on a terminal one line that grows."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, expected in (
        (quiet(), "Work:  50% 1.00 KiB of 2.00 KiB\nWork: 100% 2.00 KiB of 2.00 KiB in 12.0 s\n"),
        (Terminal(), f"\r[{'#' * 15}{'.' * 15}] Work:  50% 1.00 KiB of 2.00 KiB\r[{'#' * 30}] Work: 100% 2.00 KiB of 2.00 KiB in 12.0 s\n"),
    ):
        now[0] = 100.0
        progress = Progress("Work", 2048, stream)
        for second in range(1, 7):
            now[0] = 100.0 + second * 0.01
            progress.add(128)
        now[0] = 106.0
        progress.add(256)
        now[0] = 106.01
        progress.add(1024)
        now[0] = 112.0
        progress.finish()
        assert stream.getvalue() == expected
