"""Models of a box: checked before they are one, linked or copied, listed, taken away."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Ctl, Said

Model = Callable[..., Said]
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32", "hidden_size": 256, "vocab_size": 1000,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 512, "max_position_embeddings": 2048,
}  # fmt: skip


def weights(data_bytes: int = 1024) -> bytes:
    """A safetensors file of one tensor."""
    tensor = {"dtype": "F32", "shape": [256], "data_offsets": [0, 1024]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "model.norm.weight": tensor})
    return len(header).to_bytes(8, "little") + header.encode() + bytes(data_bytes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole model."""
    folder = tmp_path / "downloads" / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights())
    return folder


@pytest.fixture
def model(ctl: Ctl, tmp_path: Path) -> Model:
    """`appliancectl model ...` about a state folder of its own."""
    config = tmp_path / "appliance.toml"
    config.write_text("")
    return lambda *words: ctl("--config", config, "--state-dir", tmp_path / "state", "model", *words)


def test_a_model_is_linked_listed_and_taken_away(model: Model, folder: Path, tmp_path: Path) -> None:
    """Its files stay where they are, also when it is removed."""
    added = model("add", folder)
    target = tmp_path / "state/models/tiny"
    assert (added.code, target.is_symlink()) == (0, True)
    assert f'model.path = "{target}"' in added.out
    (row,) = json.loads(model("list", "--json").out)["models"]
    assert (row["name"], row["weight_bytes"], row["linked"], row["configured"]) == ("tiny", 1024, True, False)
    assert "already" in model("add", folder).err
    assert model("remove", "tiny").code == 0
    assert not target.exists()
    assert (folder / "config.json").exists()
    assert "none in" in model("list").out


def test_a_copy_is_there_whole_or_not_at_all(model: Model, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an interrupted copy left is no model, and is not in the way of the next try."""

    def interrupted(source: Path, to: Path) -> None:
        to.mkdir()
        (to / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copytree", interrupted)
        with contextlib.suppress(KeyboardInterrupt):
            model("add", folder, "--copy")
    assert "none in" in model("list").out
    assert model("add", folder, "--copy", "--name", "tiny").code == 0
    assert (tmp_path / "state/models/tiny/model.safetensors").stat().st_size == len(weights())
    assert model("remove", "tiny").code == 0
    assert list((tmp_path / "state/models").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("model.safetensors", weights(1000), "of 1,"),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        ("model.safetensors", b"\xff" * 64, "no safetensors file"),
        ("config.json", b"{", "config.json is no JSON"),
        ("tokenizer.json", None, "no tokenizer"),
        ("model.safetensors", None, "no weights"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "model-2-of-2.safetensors"}}', "model-2-of-2.safetensors is missing"),
    ],
)
def test_what_is_not_whole_is_told_of(model: Model, folder: Path, name: str, content: bytes | None, words: str) -> None:
    """By the file and what is wrong with it; nothing of it becomes a model."""
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    said = model("add", folder)
    assert said.code == 1
    assert words in said.err
    assert "none in" in model("list").out


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}", ""),
        ("{% for m in messages %}", "does not compile: line 1"),
        ("{{ raise_exception('only for machines') }}", "only for machines"),
        (None, ""),
    ],
)
def test_a_template_that_does_not_render_is_told_of(model: Model, folder: Path, template: str | None, words: str) -> None:
    """By the renderer that will render it; the model is one all the same, as it continues text."""
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"} | ({"chat_template": template} if template else {})))
    said = model("add", folder)
    assert (said.code, "chats will be refused" in said.err) == (0, bool(words))
    assert words in said.err


@pytest.mark.parametrize(
    ("backend", "change", "words"),
    [
        ("native", {}, ""),
        ("native", {"architectures": ["MambaForCausalLM"]}, "architecture MambaForCausalLM is not supported by the built-in engine"),
        ("native", {"quantization_config": {"quant_method": "awq"}}, "quantisation 'awq' is not supported by the built-in engine"),
        ("sglang", {"architectures": ["MambaForCausalLM"]}, ""),
    ],
)
def test_a_model_that_the_configured_engine_does_not_serve_is_told_of(
    model: Model, folder: Path, tmp_path: Path, backend: str, change: dict[str, object], words: str
) -> None:
    """With what it is, and the engine that does: it is one of this box's models all the same, for that engine."""
    (tmp_path / "appliance.toml").write_text(f'[engine]\nbackend = "{backend}"\n')
    (folder / "config.json").write_text(json.dumps(CONFIG | change))
    said = model("add", folder)
    assert said.code == 0
    assert ("does not serve it" in said.err) == bool(words)
    assert words in said.err
    assert ('engine.backend = "sglang" or "vllm"' in said.err) == bool(words)


def test_a_gguf_file_becomes_a_folder_for_the_built_in_engine(model: Model, tmp_path: Path) -> None:
    """By its converter; what that cannot read it says itself, and nothing is left under the name."""
    import gguf

    from tests.engine.tiny_gguf import LLAMA, write_gguf

    source = write_gguf(tmp_path / "m.gguf", tmp_path / "original", LLAMA, gguf.GGMLQuantizationType.Q8_0)
    linked = model("add", f"gguf:{source}", "--name", "linked")
    assert (linked.code, "--convert" in linked.out) == (0, True)
    said = model("add", f"gguf:{source}", "--convert")
    target = tmp_path / "state/models/m"
    assert said.code == 0, said.err
    assert json.loads((target / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert f'model.path = "{target}"' in said.out
    assert "there is a model 'm' already" in model("add", source, "--convert").err
    (tmp_path / "no.gguf").write_text("no")
    assert model("add", tmp_path / "no.gguf", "--convert").code == 1
    assert not (tmp_path / "state/models/no").exists()
    assert "--convert is for a GGUF file" in model("add", "demo", "--convert").err


def test_the_configured_model_stays(ctl: Ctl, folder: Path, tmp_path: Path) -> None:
    """And is marked in the list."""
    config = tmp_path / "appliance.toml"
    config.write_text(f'[model]\npath = "{tmp_path}/state/models/tiny"\n')
    at = ("--config", config, "--state-dir", tmp_path / "state", "model")
    ctl(*at, "add", folder)
    assert "* tiny" in ctl(*at, "list").out
    refused = ctl(*at, "remove", "tiny")
    assert (refused.code, "model.path" in refused.err) == (1, True)


def test_what_cannot_be_added_says_what_can(model: Model, tmp_path: Path) -> None:
    """A folder that is not there, a name that is a path, a model that is not here."""
    assert "does not exist" in model("add", tmp_path / "nowhere").err
    assert "--name" in model("add", tmp_path, "--name", "../x").err
    assert "there are: none" in model("remove", "x").err
    (tmp_path / "pointer.gguf").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "Git LFS pointer" in model("add", f"gguf:{tmp_path}/pointer.gguf").err
