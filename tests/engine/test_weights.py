"""Model folders that cannot be served are named before anything is loaded, with the cure."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from appliance.core.errors import ModelError
from appliance.engine.build import load_decoder, load_parts
from appliance.engine.models.registry import read_config
from appliance.engine.settings import EngineSettings
from appliance.engine.weights import ModelWeights, WouldCopy, read_config_json
from tests.engine.test_tiny_models import SIZES, save_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good one."""
    return save_checkpoint(transformers.LlamaConfig(**SIZES), tmp_path / "model")


def load(folder: Path) -> None:
    """As the engine does."""
    load_parts(EngineSettings(folder, kv_pool_bytes=2**21))


def edit(folder: Path, **changes: Any) -> None:
    """Change keys of config.json; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def test_a_missing_folder(tmp_path: Path) -> None:
    """With the key to set and the demo."""
    with pytest.raises(ModelError, match=r"nowhere does not exist; set model\.path, or bring the demo: `appliancectl setup --demo`"):
        load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", None, "config.json is missing"),
        ("config.json", b"{oops", "config.json cannot be read"),
        ("config.json", b"[]", "config.json must hold a JSON object"),
        ("model.safetensors", None, "has neither model.safetensors nor"),
        ("model.safetensors", b"", "is no safetensors file, or cut off after 0 B"),
        ("model.safetensors", b"\xff" * 64, "is no safetensors file"),
        ("model.safetensors", (20).to_bytes(8, "little") + b"{not json" + b" " * 40, "has a damaged header"),
        (
            "model.safetensors",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            "is a Git LFS pointer of 56 bytes.*git lfs pull",
        ),
    ],
)
def test_missing_and_damaged_files(folder: Path, name: str, content: bytes | None, words: str) -> None:
    """Each is named."""
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(ModelError, match=words):
        load(folder)


def test_a_download_that_stopped_in_the_middle(folder: Path) -> None:
    """Cut off in the header, in the data, and one byte short."""
    content = (folder / "model.safetensors").read_bytes()
    for size in (5, 100, 5000, len(content) - 1):
        (folder / "model.safetensors").write_bytes(content[:size])
        with pytest.raises(ModelError, match="cut off"):
            load(folder)


def test_a_shard_that_is_not_there(tmp_path: Path) -> None:
    """Its name, and how many there should be."""
    folder = save_checkpoint(transformers.LlamaConfig(**SIZES), tmp_path, max_shard_size="100KB")
    shards = sorted(folder.glob("*.safetensors"))
    shards[1].unlink()
    with pytest.raises(ModelError, match=f"lacks 1 of {len(shards)} weight files: {shards[1].name}"):
        load(folder)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("model.gguf", "convert it: python -m appliance.engine.convert"),
        ("pytorch_model.bin", "is a pickle"),
        ("model.safetensors.incomplete", "is an unfinished download"),
    ],
)
def test_what_lies_there_instead_says_what_to_do(folder: Path, file: str, words: str) -> None:
    """A GGUF, a pickle, an unfinished download."""
    (folder / "model.safetensors").unlink()
    (folder / file).write_bytes(b"x")
    with pytest.raises(ModelError, match=words):
        load(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "architecture MambaForCausalLM is not supported.*supported: LlamaForCausalLM, Mistral.*engine.backend",
        ),
        ({"architectures": None}, "architectures is None, expected a list with one name"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantisation 'gptq' is not supported.*engine.backend"),
        (
            {"rope_parameters": {"rope_type": "longrope", "factor": 4.0}},
            "rope scaling 'longrope' is not supported.*supported: default, linear, llama3, yarn; .* engine.backend",
        ),
        ({"rope_parameters": {"rope_type": "yarn"}}, "factor is None, expected a number"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 0.5}}, "factor is 0.5, expected at least 1"),
        ({"hidden_act": "relu"}, "activation 'relu' is not supported; supported: silu, gelu"),
        ({"mlp_bias": True}, "mlp_bias = True is not supported"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, expected a whole number of at least 1"),
        ({"hidden_size": "64"}, "hidden_size is '64', expected a whole number"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small', expected a number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1, expected true or false"),
        ({"vocab_size": 400}, r"embed_tokens\.weight has shape \[331, 64\], config\.json implies \[400, 64\]"),
        ({"num_hidden_layers": 4}, r"no tensor model\.layers\.3\."),
        ({"intermediate_size": 100}, r"gate_proj\.weight has shape \[96, 64\], config\.json implies \[100, 64\]"),
    ],
)
def test_configurations_that_cannot_be_served(folder: Path, change: dict[str, Any], words: str) -> None:
    """The key, its value, and what would do."""
    edit(folder, **change)
    with pytest.raises(ModelError, match=words):
        load(folder)


def test_gemma_must_say_what_each_layer_sees() -> None:
    """A list of the wrong length or with another word."""
    config = transformers.Gemma3TextConfig(**(SIZES | {"head_dim": 32})).to_dict() | {"architectures": ["Gemma3ForCausalLM"]}
    for types in (["full_attention"], ["full_attention"] * 2 + ["chunked_attention"]):
        with pytest.raises(ModelError, match="layer_types must hold 3 entries"):
            read_config(config | {"layer_types": types})
    with pytest.raises(ModelError, match=r"final_logit_softcapping = 30\.0 is not supported"):
        read_config(config | {"final_logit_softcapping": 30.0})


def test_gemma_has_no_yarn_and_qwen_has_the_context_that_it_makes() -> None:
    """Which its instructions add to a file that goes on naming the shorter one."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    gemma = transformers.Gemma3TextConfig(**(SIZES | {"head_dim": 32})).to_dict() | {"architectures": ["Gemma3ForCausalLM"]}
    with pytest.raises(ModelError, match="rope scaling 'yarn' is not supported"):
        read_config(gemma | {"rope_parameters": {"full_attention": yarn, "sliding_attention": {"rope_type": "default"}}})
    qwen = transformers.Qwen2Config(**SIZES).to_dict() | {"architectures": ["Qwen2ForCausalLM"]}
    assert read_config(qwen).max_context_tokens == 512
    assert read_config(qwen | {"rope_parameters": yarn | {"rope_theta": 1e6}}).max_context_tokens == 2048
    del qwen["rope_parameters"]
    older = {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512}}
    assert read_config(qwen | older).max_context_tokens == 1024


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_dtypes_that_cannot_be_served(folder: Path, dtype: torch.dtype) -> None:
    """Named as the file names them."""
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(dtype)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"tensor model\.norm\.weight is stored as (I8|F8_E4M3), which the built-in engine does not serve"):
        load(folder)


def test_float32_weights_are_mapped_not_copied(folder: Path) -> None:
    """The same memory for two readers of one ModelWeights, and the file's content."""
    weights = ModelWeights(folder)
    name, shape = "model.layers.0.self_attn.o_proj.weight", (64, 64)
    assert weights.get(name, shape).data_ptr() == weights.get(name, shape).data_ptr()
    assert torch.equal(weights.get(name, shape), load_file(folder / "model.safetensors")[name])


def test_a_stray_write_into_the_weights_ends_the_process(folder: Path) -> None:
    """Instead of serving another model than the owner chose."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom appliance.engine.weights import ModelWeights\n"
        "ModelWeights(Path(sys.argv[1])).get('model.norm.weight', (64,))[3] = 0.0\n"
    )
    ended = subprocess.run([sys.executable, "-W", "error", "-c", code, str(folder)], capture_output=True, timeout=60, check=False)
    assert ended.returncode == -signal.SIGSEGV, ended.stderr


def test_matrices_that_lie_apart_are_stacked_by_copy(folder: Path) -> None:
    """transformers orders tensors by name: k, o, q, v."""
    weights = ModelWeights(folder)
    names = tuple(f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv")
    stacked = weights.stacked(names, (64, 32, 32), 64)
    parts = [weights.get(name, (rows, 64)) for name, rows in zip(names, (64, 32, 32), strict=True)]
    assert torch.equal(stacked, torch.cat(parts))


def test_copies_are_refused_where_they_are_not_wanted(folder: Path) -> None:
    """A spare may not hold a second set of weights: one of another dtype, or matrices that lie apart, end the load before it copies."""
    stacked_bytes = 3 * (64 + 32 + 32) * 64 * 4  # q, k and v of three layers
    load_decoder(folder, stacked_bytes)
    with pytest.raises(WouldCopy, match="have to be copied before use"):
        load_decoder(folder, stacked_bytes - 1)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}, folder / "model.safetensors")
    weights = ModelWeights(folder, 0)
    with pytest.raises(WouldCopy):
        weights.get("model.norm.weight", (64,))
    load(folder)


@pytest.mark.parametrize("shift", [0, 1, 2, 3])
def test_a_header_of_any_length_is_read(folder: Path, shift: int) -> None:
    """The format does not promise that the data begins at a multiple of four bytes."""
    path = folder / "model.safetensors"
    before = load_file(path)["model.norm.weight"].clone()  # load_file maps the file that is rewritten below
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length] + b" " * shift
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    weights = ModelWeights(folder)
    assert torch.equal(weights.get("model.norm.weight", (64,)), before)


def test_a_folder_without_a_manifest_is_taken_as_it_is(folder: Path) -> None:
    """One from elsewhere; a damaged manifest is an error."""
    assert read_config_json(folder)["model_type"] == "llama"
    write: Callable[[str], int] = (folder / "manifest.json").write_text
    write('{"format": 1}')
    with pytest.raises(ModelError, match=r"manifest\.json is damaged"):
        read_config_json(folder)
    write('{"format": 99}')
    assert read_config_json(folder)["model_type"] == "llama"
