"""`appliancectl model add hf:...` by the real huggingface_hub, from a hub on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.cli import hub
from tests.fakes.hub import Hub
from tests.unit.cli.conftest import Ctl
from tests.unit.cli.test_model import CONFIG, Model

DATA_BYTES = 72 * 1024**2
"""The client writes 10 MiB at once: what is cut before that is lost to it."""


@pytest.fixture
def model(ctl: Ctl, tmp_path: Path) -> Model:
    """`appliancectl model ...` about a state folder of its own."""
    config = tmp_path / "appliance.toml"
    config.write_text("")
    return lambda *words: ctl("--config", config, "--state-dir", tmp_path / "state", "model", *words)


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub with a model, beside it what engines do not read."""
    header = json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [DATA_BYTES // 4], "data_offsets": [0, DATA_BYTES]}}).encode()
    files = {
        "config.json": json.dumps(CONFIG).encode(), "tokenizer.json": b"{}", "README.md": b"#", "pytorch_model.bin": bytes(90_000),
        "model.safetensors": len(header).to_bytes(8, "little") + header + bytes(DATA_BYTES), "consolidated.safetensors": bytes(90_000),
    }  # fmt: skip
    with Hub("org/tiny", files) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        yield hub


def test_a_download_that_was_cut_goes_on_over_a_second_call(one: Hub, model: Model, tmp_path: Path) -> None:
    """Nothing of it is a model before it is whole; only the rest is fetched; only what engines read comes; no trace of the work is left."""
    one.cut_at, one.cuts, one.refusals = 32 * 1024**2, 1, 1
    of_another_commit = tmp_path / "state/models/.tiny.000000000000.hub"
    of_another_commit.mkdir(parents=True)
    first = model("add", "hf:org/tiny")
    assert (first.code, "is kept for the next try" in first.err) == (1, True)
    assert "none in" in model("list").out
    assert model("add", "hf:org/tiny@main").code == 0
    assert one.ranges[0] == ""
    assert [int(asked.removeprefix("bytes=").strip("-")) >= 30 * 1024**2 for asked in one.ranges[1:]] == [True, True]
    folder = tmp_path / "state/models/tiny"
    assert {file.name for file in folder.iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == one.files["model.safetensors"]
    assert [file.name for file in folder.parent.iterdir()] == ["tiny"]
    assert json.loads(model("list", "--json").out)["models"][0]["weight_bytes"] == DATA_BYTES


def test_what_cannot_be_had_is_told_with_the_cure(one: Hub, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed door and its key, a revision that is not there, a disk that is too small, no network."""
    one.token = "hf_secret"
    refused = model("add", "hf:org/tiny")
    assert (refused.code, "--token-file" in refused.err, "org/tiny" in refused.err) == (1, True, True)
    (tmp_path / "token").write_text("hf_secret\n")
    monkeypatch.setattr(hub, "KEPT_FREE_BYTES", 1 << 60)
    full = model("add", "hf:org/tiny", "--token-file", tmp_path / "token")
    assert "not enough disk space" in full.err
    assert "the model has 72.00 MiB" in full.err
    assert "has no v9" in model("add", "hf:org/tiny@v9").err  # the token is still in our environment
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    offline = model("add", "hf:org/tiny")
    assert "http://127.0.0.1:9 cannot be reached" in offline.err
    assert "hf download org/tiny --local-dir DIR" in offline.err


@pytest.mark.parametrize("source", ["hf:tiny", "hf:", "hf:org/tiny@", "hf:../x/y", "hf:org/ti ny"])
def test_what_names_no_model_is_told(model: Model, source: str) -> None:
    """Before anything is asked of a hub."""
    said = model("add", source)
    assert (said.code, "write hf:ORG/NAME" in said.err) == (1, True)


@pytest.mark.parametrize("change", [{"architectures": ["MambaForCausalLM"]}, {"quantization_config": {"quant_method": "awq"}}])
def test_what_the_engine_does_not_serve_is_told_before_the_weights_come(one: Hub, model: Model, change: dict[str, object]) -> None:
    """Whoever wants it for the built-in engine ends it there; what has arrived of it is kept as of any other. It is told once."""
    one.files = {**one.files, "config.json": json.dumps(CONFIG | change).encode()}
    one.cut_at, one.cuts, one.refusals = 32 * 1024**2, 1, 1
    cut = model("add", "hf:org/tiny")
    assert cut.code == 1
    assert cut.err.count("does not serve it") == 1
    assert 'engine.backend = "sglang" or "vllm"' in cut.err
    assert cut.err.index("does not serve it") < cut.err.index("is kept for the next try")
    whole = model("add", "hf:org/tiny")
    assert (whole.code, whole.err.count("does not serve it")) == (0, 1)
