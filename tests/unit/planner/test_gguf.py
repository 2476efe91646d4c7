"""GGUF files, written by the gguf package, read by us."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from appliance.core.errors import ModelError
from appliance.planner.model_files import model_facts


def _write(file: Path, architecture: str = "qwen3", *, hybrid: bool = False, output: bool = True) -> None:
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_name("Little One")
    writer.add_block_count(4)
    writer.add_context_length(4096)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_token_list([f"token {i}" for i in range(300)])
    writer.add_array("tokenizer.ggml.scores", [0.5] * 300)
    writer.add_chat_template("{{ messages }}")
    if hybrid:
        writer.add_uint32(f"{architecture}.full_attention_interval", 4)
        writer.add_ssm_inner_size(64)
        writer.add_ssm_state_size(16)
        writer.add_ssm_group_count(2)
        writer.add_ssm_conv_kernel(4)
        writer.add_ssm_time_step_rank(4)
    writer.add_tensor("token_embd.weight", np.zeros((300, 64), dtype=np.float16))
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((64, 34), dtype=np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    if output:
        writer.add_tensor("output.weight", np.zeros((300, 64), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_shape_and_true_bytes_are_read(tmp_path: Path) -> None:
    """Quantised tensors by their blocks; the input embedding is known to stay in host memory."""
    _write(tmp_path / "model.gguf")
    model = model_facts(tmp_path / "model.gguf")
    assert (model.full_attention_layers, model.kv_heads, model.head_dim, model.vocab_size) == (4, 2, 16, 300)
    assert (model.max_context_tokens, model.name, model.chat_template) == (4096, "Little One", True)
    embedding = 300 * 64 * 2
    assert model.weight_bytes == embedding + 64 * 34 + 300 * 64 * 4
    assert model.host_weight_bytes == embedding
    assert model_facts(tmp_path) == model  # a folder that holds nothing else


def test_a_tied_embedding_is_needed_on_the_card(tmp_path: Path) -> None:
    """Without an output tensor the embedding is the output."""
    _write(tmp_path / "model.gguf", output=False)
    assert model_facts(tmp_path / "model.gguf").host_weight_bytes == 0


def test_a_hybrids_linear_layers_and_state_are_read(tmp_path: Path) -> None:
    """One full layer in four; state and convolution from ssm.*."""
    _write(tmp_path / "model.gguf", "qwen35", hybrid=True)
    model = model_facts(tmp_path / "model.gguf")
    assert (model.full_attention_layers, model.linear_attention_layers) == (1, 3)
    assert model.linear is not None
    assert (model.linear.state_elements, model.linear.conv_channels, model.linear.conv_kernel) == (64 * 16, 64 + 2 * 2 * 16, 4)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"nope" * 20, "no GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 5) + b"x", "cannot be read"),
        (b"GGUF\x01" + bytes(40), "version 1"),
    ],
)
def test_other_files_are_refused_in_words(tmp_path: Path, content: bytes, said: str) -> None:
    """Not GGUF, cut off, or of a version that is not read."""
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelError, match=said):
        model_facts(file)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    """Split files come together."""
    _write(tmp_path / "model-00001-of-00002.gguf")
    with pytest.raises(ModelError, match=r"1 of 2 parts are missing, such as model-00002-of-00002\.gguf"):
        model_facts(tmp_path / "model-00001-of-00002.gguf")
