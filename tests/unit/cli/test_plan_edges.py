"""`appliancectl plan` at its edges: each mistake is told with the value, the limit and the cure, and never by a traceback."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.planner import shapes

ROOT = Path(__file__).parents[3]
GOOD = ["plan", "--model", "llama-3.1-8b", "--gpu", "rtx3090", "--engine", "sglang"]
HYBRID = ["plan", "--model", "qwen3.8-27b", "--gpu", "rtx3090", "--engine", "sglang"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--red-line", "5"], ["'5'", "from 0.2 to 1", "0.95"]),
        (["--red-line", "nan"], ["'nan'", "0.95"]),
        (["--red-line", "0"], ["'0'"]),
        (["--red-line", "0.1"], ["'0.1'", "from 0.2 to 1"]),
        (["--red-line", "-inf"], ["'-inf'"]),
        (["--mem-fraction", "nan"], ["'nan'", "0.93"]),
        (["--mem-fraction", "1e-400"], ["'1e-400'"]),
        (["--mem-fraction", "0"], ["'0'", "above 0"]),
        (["--mem-fraction", "93"], ["'93'", "1 at most"]),
        (["--mem-fraction", "-0.5"], ["'-0.5'"]),
        (["--engine-version", "newest"], ["'newest'", "0.5.17"]),
        (["--engine-version", "9" * 400], ["is no version of sglang"]),
        (["--engine", "tgi"], ["'tgi'", "sglang, vllm, llamacpp, native"]),
        (["--ssm-dtype", "x"], ["'x'", "no linear layers"]),
        (["--kv-dtype", "x"], ["'x'", "fp8_e4m3"]),
        (["--gpu", "rtx9999"], ["'rtx9999'", "rtx3090", "24GiB"]),
        (["--gpu", "9" * 400 + "GiB"], ["is no card"]),
        (["--gpu", "999999999999GiB"], ["1048576.00 GiB are the most"]),
        (["--gpu", "0GiB"], ["too small"]),
        (["--gpu", "-24GiB"], ["'-24GiB'"]),
        (["--gpu", "nanGiB"], ["'nanGiB'"]),
        (["--context", "nan"], ["'nan'", "102400 or 100k"]),
        (["--context", "²"], ["'²'", "102400"]),
        (["--context", "-5"], ["'-5'"]),
        (["--context", "0"], ["0 is less than 1"]),
        (["--context", "999999999999999"], ["131,072"]),
        (["--context", "9" * 5000], ["is no number of tokens"]),
        (["--min-context", "1e9"], ["'1e9'"]),
        (["--max-running", "0"], ["0 is less than 1"]),
        (["--max-running", "1" + "0" * 17], ["65,536"]),
        (["--max-running", "1" + "0" * 400], ["is no whole number"]),
        (["--max-running", "2.5"], ["'2.5'"]),
        (["--chunk", "15"], ["less than 16"]),
        (["--chunk", "99999999999999999"], ["1,048,576"]),
        (["--tp", "0"], ["0 is less than 1"]),
        (["--tp", "-2"], ["-2 is less than 1"]),
        (["--tp", "4096"], ["1,024"]),
        (["--tp", "3"], ["32 attention heads", "1, 2, 4, 8, 16"]),
        (["--draft-tokens", "999"], ["64"]),
        (["--draft-tokens", "-1"], ["less than 0"]),
        (["--state-slots", "0"], ["less than 1"]),
        (["--block-tokens", "0"], ["less than 1"]),
        (["--block-tokens", "10000000"], ["65,536"]),
        (["--weights", "nan"], ["'nan'", "24GiB or 512MiB"]),
        (["--weights", "-1GiB"], ["'-1GiB'"]),
        (["--weights", "inf"], ["'inf'"]),
        (["--weights", "99999999TiB"], ["measured weight", "are the most"]),
        (["--kv-pool", "99999999TiB"], ["measured kv pool"]),
        (["--free", "100GiB"], ["23.56 GiB"]),
        (["--oom-headroom", "100GiB"], ["23.56 GiB"]),
        (["--off", "everything"], ["'everything'", "cuda_graph"]),
        (["--from-log", "/nonexistent"], ["/nonexistent"]),
        (["--from-log", "/"], ["cannot be read"]),
    ],
)
def test_a_bad_value_is_named_with_its_limit(ctl, arguments: list[str], words: list[str]) -> None:
    """Exit 2 for usage (a log that cannot be read: 1), and a plain plan with the value left out goes through."""
    said = ctl(*GOOD, *arguments)
    assert said.code == (1 if "--from-log" in arguments else 2), said
    assert not said.out
    assert "Traceback" not in said.err
    assert len(said.err) < 2000
    for word in words:
        assert word in said.err, said.err


def test_the_state_dtype_is_one_that_the_engine_has(ctl) -> None:
    """Accepted in silence it would have been a plan for an engine that does not start."""
    said = ctl(*HYBRID, "--ssm-dtype", "fp8_e4m3")
    assert (said.code, "float32, bfloat16" in said.err) == (2, True)
    assert ctl(*HYBRID, "--ssm-dtype", "bfloat16", "--weights", "14GiB").code == 0
    assert "leave --ssm-dtype out" in ctl("plan", "--model", "qwen3.8-27b", "--gpu", "64GiB", "--engine", "native", "--ssm-dtype", "x").err


@pytest.mark.parametrize("engine", ["sglang", "vllm", "llamacpp", "native"])
@pytest.mark.parametrize("version", ["0.0.1", "v0.5.17.post1", "0.20.2rc1", "99.99", "b11434", "0.6.0+cu126"])
def test_versions_as_engines_print_them_are_taken(ctl, engine: str, version: str) -> None:
    """Older and newer ones than the rules that we know go by the nearest."""
    gpu = "64GiB" if engine == "native" else "rtx3090"
    assert ctl("plan", "--model", "llama-3.1-8b", "--gpu", gpu, "--engine", engine, "--engine-version", version, "--json").code in (0, 1)


def config_of(**changes: object) -> str:
    """A config.json with something wrong in it."""
    return json.dumps(shapes.dense() | changes)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it is empty"),
        ("{", "it is no JSON"),
        ("null", "holds no JSON object"),
        ("[1, 2]", "holds no JSON object"),
        ("{}", "hidden_size is missing"),
        ("[" * 200_000, "cannot be read"),
        ('{"a":' * 50_000 + "1" + "}" * 50_000, "cannot be read"),
        ('{"thinker_config":' * 900 + "{}" + "}" * 900, "hidden_size is missing"),
        ("\x00" * 1000, "it is no JSON"),
        (config_of(hidden_size=float("nan")), "hidden_size is nan"),
        (config_of(hidden_size=-1), "hidden_size is -1"),
        (config_of(hidden_size="4096"), "hidden_size is '4096'"),
        (config_of(hidden_size=10**400), "hidden_size is 1000"),
        (config_of(num_hidden_layers=10**12), "from 1 to 16,384"),
        (config_of(num_hidden_layers=True), "num_hidden_layers is True"),
        (config_of(num_key_value_heads="abc"), "'abc'"),
        (config_of(num_key_value_heads=-8), "kv heads -8"),
        (config_of(head_dim=float("inf")), "describes no model"),
        (config_of(intermediate_size="x"), "config.json"),
        (config_of(intermediate_size=-5), "config.json"),
        (config_of(sliding_window="x"), "describes no model"),
        (config_of(layer_types=[{}] * 3, max_position_embeddings=10**30), "max context tokens 1e+30"),
        (config_of(torch_dtype="int1"), "int1"),
        (config_of(quantization_config={"quant_method": "gptq", "bits": "four"}), None),
        (config_of(rope_parameters=[1], partial_rotary_factor="x"), None),
        (config_of(text_config=[], vision_config=7, architectures="x"), None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_broken_config_json_is_told_of(ctl, tmp_path: Path, text: str, words: str | None) -> None:
    """Empty, cut off, recursive, of wrong types, absurd: a sentence, or a plan where the model can be understood all the same."""
    file = tmp_path / "config.json"
    file.write_text(text)
    said = ctl("plan", "--model", str(file), "--gpu", "rtx3090")
    assert "Traceback" not in said.err
    if words is None:
        assert said.code in (0, 1)
    else:
        assert said.code in (1, 2), said
        assert words in said.err, said.err
        assert len(said.err) < 1000


def test_a_file_that_is_no_model_is_not_read_to_its_end(ctl, tmp_path: Path) -> None:
    """A disk image of gigabytes, a device without an end, a pipe that nobody writes to, a folder without anything."""
    huge = tmp_path / "huge.json"
    with huge.open("wb") as file:
        file.truncate(20 * 2**30)
    fifo = tmp_path / "fifo.json"
    os.mkfifo(fifo)
    for path, words in ((huge, "larger than 64 MiB"), ("/dev/zero", "no file"), (fifo, "no file"), (tmp_path, "holds no config.json")):
        said = ctl("plan", "--model", str(path), "--gpu", "rtx3090")
        assert (said.code, words in said.err) == (1, True), said


@pytest.mark.parametrize(
    "header",
    [
        b"", b"{}", b"[]", b'{"a": 5}', b'{"a": {"dtype": "F7", "shape": [1], "data_offsets": [0, 4]}}', b"[" * 100_000,
        b'{"a": {"dtype": "F32", "shape": [-1, 5], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1e9], "data_offsets": []}}',
    ],
    ids=lambda value: value[:30].decode(),
)  # fmt: skip
def test_broken_tensor_headers_are_told_of(ctl, tmp_path: Path, header: bytes) -> None:
    """The folder of a download that went wrong."""
    (tmp_path / "config.json").write_text(config_of())
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    said = ctl("plan", "--model", str(tmp_path), "--gpu", "rtx3090")
    assert said.code in (0, 1)
    assert "Traceback" not in said.err


def test_a_gguf_file_that_lies_about_its_length_ends(ctl, tmp_path: Path) -> None:
    """A list of 2^60 strings in a file of a hundred bytes."""
    name = b"tokenizer.ggml.tokens"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(name)) + name + struct.pack("<IIQ", 9, 8, 1 << 60)
    (tmp_path / "m.gguf").write_bytes(head + b"\x00" * 40)
    said = ctl("plan", "--model", str(tmp_path / "m.gguf"), "--gpu", "rtx3090")
    assert (said.code, "cannot be read" in said.err) == (1, True), said


@pytest.mark.parametrize("more", [[], ["--json"], ["--help"]])
def test_a_reader_that_has_seen_enough_is_no_error(more: list[str]) -> None:
    """`appliancectl plan ... | head -1`: exit 0 and not a word."""
    command = [sys.executable, "-c", "import sys; from appliance.cli.__main__ import main; sys.argv[0] = 'appliancectl'; main()"]
    ours, theirs = os.pipe()
    process = subprocess.Popen([*command, *GOOD, *more], stdout=theirs, stderr=subprocess.PIPE, cwd=ROOT)
    os.close(theirs)
    os.close(ours)  # before a word was written
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")
