"""Model folders as they lie on disk: whole, half-written, and of other kinds."""

import json
import struct
from pathlib import Path

import pytest

from appliance.core.errors import ModelError
from appliance.planner.model_files import HEADER_LIMIT_BYTES, model_facts, tensor_sizes
from tests.unit.planner import shapes


def write_shard(file: Path, tensors: dict[str, tuple[str, list[int], int]], *, cut_bytes: int = 0) -> None:
    """A safetensors file: name → (dtype, shape, bytes), its data zeros."""
    at, header = 0, {"__metadata__": {"format": "pt"}}
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}  # type: ignore[assignment]
        at += size
    raw = json.dumps(header).encode()
    file.write_bytes((struct.pack("<Q", len(raw)) + raw + bytes(at))[: 8 + len(raw) + at - cut_bytes])


def _folder(tmp_path: Path, **config: object) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(shapes.dense(num_hidden_layers=2, **config)))
    return tmp_path


def test_true_bytes_come_from_all_shards(tmp_path: Path) -> None:
    """By dtype and shape, drafter and vision tower told apart."""
    folder = _folder(tmp_path)
    write_shard(folder / "model-00001-of-00002.safetensors", {"model.layers.0.a": ("BF16", [10, 3], 60), "visual.b": ("F32", [5], 20)})
    write_shard(folder / "model-00002-of-00002.safetensors", {"model.layers.2.c": ("I8", [7], 7), "mtp.d": ("F16", [2], 4),
                                                             "e": ("F4", [9], 5)})  # fmt: skip
    model = model_facts(folder)
    assert (model.weight_bytes, model.draft_weight_bytes, model.vision_weight_bytes) == (96, 11, 20)
    assert model.weights_from == "safetensors headers"
    assert model.name == folder.resolve().name


def test_a_bare_config_is_worked_out(tmp_path: Path) -> None:
    """Without tensors the bytes come from the configuration, and the facts say so."""
    model = model_facts(_folder(tmp_path) / "config.json")
    assert model.weight_bytes > 10**9
    assert "config.json" in model.weights_from
    assert model_facts(tmp_path).weight_bytes == model.weight_bytes


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    """The index knows what the folder lacks."""
    folder = _folder(tmp_path)
    write_shard(folder / "a.safetensors", {"x": ("BF16", [1], 2)})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}))
    with pytest.raises(ModelError, match=r"1 of 2 weight files .* such as b\.safetensors"):
        model_facts(folder)


def test_a_shard_that_is_cut_off_is_told(tmp_path: Path) -> None:
    """Both sizes are in the sentence."""
    folder = _folder(tmp_path)
    write_shard(folder / "a.safetensors", {"x": ("BF16", [500], 1000)}, cut_bytes=1)
    with pytest.raises(ModelError, match=r"is cut off: [\d,]+ bytes of [\d,]+"):
        model_facts(folder)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "Git LFS pointer"),
        (struct.pack("<Q", HEADER_LIMIT_BYTES + 1) + b"{}", "no safetensors file"),
        (b"abc", "no safetensors file"),
        (struct.pack("<Q", 4) + b"nope", "header cannot be read"),
        (struct.pack("<Q", 40) + b'{"x":{"dtype":"Q9","shape":[1],"d":[0,1]}', "header cannot be read"),
    ],
)
def test_other_files_are_no_weights(tmp_path: Path, content: bytes, said: str) -> None:
    """Each gets a sentence of its own."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(ModelError, match=said):
        tensor_sizes(file)


def test_a_folder_without_a_config_or_one_that_is_not_there(tmp_path: Path) -> None:
    """What is looked for is named."""
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        model_facts(tmp_path)
    with pytest.raises(ModelError, match="does not exist"):
        model_facts(tmp_path / "nothing")
    (tmp_path / "config.json").write_text("[1, 2")
    with pytest.raises(ModelError, match="cannot be read"):
        model_facts(tmp_path)
    (tmp_path / "config.json").write_text("[1, 2]")
    with pytest.raises(ModelError, match="no JSON object"):
        model_facts(tmp_path)


def test_modelopts_quantisation_file_is_read(tmp_path: Path) -> None:
    """hf_quant_config.json stands beside config.json."""
    folder = _folder(tmp_path)
    plain = model_facts(folder).weight_bytes
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}))
    model = model_facts(folder)
    assert model.weight_bytes < plain
    assert model.quantisation == "nvfp4"


def test_a_chat_template_is_noticed_in_each_of_its_places(tmp_path: Path) -> None:
    """In a file of its own or in the tokenizer's configuration."""
    folder = _folder(tmp_path)
    assert not model_facts(folder).chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert model_facts(folder).chat_template
