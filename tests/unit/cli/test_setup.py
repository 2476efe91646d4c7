"""`appliancectl setup`: the environment is switched at once, the configuration is never written over an edit."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.cli import recipes, runtimes, setup_config
from appliance.cli.setup_plan import planned
from appliance.config import load_config
from appliance.config.runtimes import current_runtime, launch_python, put_in_force, with_runtime
from appliance.config.schema import Config
from appliance.core.errors import ApplianceError, BudgetError
from tests.fakes.small_disk import NEEDS_ROOT, small_disk
from tests.unit.cli.conftest import Ctl
from tests.unit.cli.wheels import make_wheel


@pytest.fixture
def wheelhouse(tmp_path: Path) -> Path:
    """Wheels of two empty packages under the names of ours and of torch."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    return folder


def _ours(folder: Path, version: str) -> Path:
    engine = {"appliance/__init__.py": "", "appliance/engine/__init__.py": "", "appliance/engine/__main__.py": ""}
    return make_wheel(folder, "llm_appliance", version, engine, 'Requires-Dist: torch; extra == "engine"\n')


def test_versions_lie_side_by_side_and_one_is_in_force(wheelhouse: Path, tmp_path: Path) -> None:
    """Made from the wheelhouse alone; a second time nothing is made; the next version leaves the first as it is."""
    make_wheel(wheelhouse, "torch", "9.9", {"torch.py": '__version__ = "9.9"'})
    ours = _ours(wheelhouse, "1.0")
    first = runtimes.install(recipes.native(ours), tmp_path, runtimes.Means(wheelhouse))
    assert current_runtime(tmp_path) == first == tmp_path / "runtimes/native-1.0"
    subprocess.run([first / "bin/python", "-c", "import appliance.engine.__main__"], cwd="/", check=True)
    made = (first / "runtime.json").stat().st_mtime_ns
    runtimes.install(recipes.native(ours), tmp_path, runtimes.Means(wheelhouse))
    assert (first / "runtime.json").stat().st_mtime_ns == made
    second = runtimes.install(recipes.native(_ours(wheelhouse, "1.1")), tmp_path, runtimes.Means(wheelhouse))
    assert current_runtime(tmp_path) == second
    assert (first / "bin/python").exists()
    assert launch_python(with_runtime(Config(), tmp_path).engine.python) == str(second / "bin/python")


def test_what_cannot_be_completed_leaves_the_old_one_in_force(wheelhouse: Path, tmp_path: Path) -> None:
    """No torch in the wheelhouse: pip fails, nothing has changed, and the next try is not in the way of its leftovers."""
    torch = make_wheel(wheelhouse, "torch", "9.9", {"torch.py": '__version__ = "9.9"'})
    first = runtimes.install(recipes.native(_ours(wheelhouse, "1.0")), tmp_path, runtimes.Means(wheelhouse))
    kept = torch.rename(tmp_path / torch.name)
    with pytest.raises(ApplianceError, match="cannot install the engine") as caught:
        runtimes.install(recipes.native(_ours(wheelhouse, "1.1")), tmp_path, runtimes.Means(wheelhouse))
    assert "--wheelhouse" in str(caught.value)
    assert current_runtime(tmp_path) == first
    kept.rename(torch)
    assert runtimes.install(recipes.native(_ours(wheelhouse, "1.1")), tmp_path, runtimes.Means(wheelhouse)).name == "native-1.1"
    assert sorted(path.name for path in (tmp_path / "runtimes").iterdir()) == [".lock", "current", "native-1.0", "native-1.1"]


def test_too_little_space_is_told_before_anything_is_made(wheelhouse: Path, tmp_path: Path) -> None:
    """With both numbers."""
    recipe = dataclasses.replace(recipes.native(_ours(wheelhouse, "1.0")), free_bytes=1 << 60)
    with pytest.raises(ApplianceError, match="not enough disk space"):
        runtimes.install(recipe, tmp_path, runtimes.Means(wheelhouse))


@NEEDS_ROOT
@pytest.mark.parametrize(("options", "words"), [("ro", "Read-only file system"), ("size=4k,nr_inodes=2", "No space left on device")])
def test_a_disk_that_takes_nothing_is_one_sentence(options: str, words: str, wheelhouse: Path, tmp_path: Path) -> None:
    """Read-only, or full: what, where and why."""
    with small_disk(tmp_path / "disk", options) as disk, pytest.raises(ApplianceError, match=words) as caught:
        runtimes.install(recipes.native(_ours(wheelhouse, "1.0")), disk / "state", runtimes.Means(wheelhouse))
    assert str(disk) in str(caught.value)


def test_a_runtime_of_another_python_is_none(tmp_path: Path) -> None:
    """After an upgrade of the distribution its python is a newer one, which finds none of its libraries: setup makes it anew."""
    folder = tmp_path / "runtimes/native-1.0"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/python").symlink_to(sys.executable)
    (folder / "lib/python3.0").mkdir(parents=True)
    put_in_force(folder)
    assert current_runtime(tmp_path) is None
    assert launch_python(with_runtime(Config(), tmp_path).engine.python) is None


def test_an_own_interpreter_wins_over_the_runtime(tmp_path: Path) -> None:
    """engine.python of the configuration."""
    file = tmp_path / "appliance.toml"
    file.write_text('[engine]\npython = "/opt/own/python"\n')
    assert with_runtime(load_config(file).config, tmp_path).engine.python == "/opt/own/python"


def test_the_drop_in_is_what_it_says(tmp_path: Path) -> None:
    """It loads, and says so again without being touched."""
    file = setup_config.write(tmp_path / "conf.d", {"model.path": "/srv/a model"}, may_replace=False)
    main = tmp_path / "appliance.toml"
    main.touch()
    assert load_config(main).config.model.path == "/srv/a model"
    before = file.stat().st_mtime_ns
    setup_config.write(tmp_path / "conf.d", {"model.path": "/srv/a model"}, may_replace=False)
    assert file.stat().st_mtime_ns == before
    setup_config.write(tmp_path / "conf.d", {"model.path": "/srv/other"}, may_replace=False)
    assert load_config(main).config.model.path == "/srv/other"


def test_an_edited_drop_in_is_kept(tmp_path: Path) -> None:
    """Unless its owner has agreed."""
    file = setup_config.write(tmp_path, {"model.path": "/srv/a"}, may_replace=False)
    file.write_text(file.read_text().replace("/srv/a", "/srv/mine"))
    with pytest.raises(ApplianceError, match="was edited"):
        setup_config.write(tmp_path, {"model.path": "/srv/b"}, may_replace=False)
    assert "/srv/mine" in file.read_text()
    setup_config.write(tmp_path, {"model.path": "/srv/b"}, may_replace=True)
    assert "/srv/b" in file.read_text()


def test_runtimes_are_listed_switched_and_removed(tmp_path: Path, ctl: Ctl) -> None:
    """The one in force cannot be removed; going back is one command."""
    for version in ("1.0", "1.1"):
        folder = tmp_path / "runtimes" / f"native-{version}"
        (folder / "bin").mkdir(parents=True)
        (folder / f"lib/python{sys.version_info.major}.{sys.version_info.minor}").mkdir(parents=True)
        (folder / "bin/python").symlink_to(sys.executable)
        (folder / runtimes.FACTS).write_text(json.dumps({"torch": "9.9", "python": "3.11"}))
        put_in_force(folder)
    rows = json.loads(ctl("--state-dir", tmp_path, "runtime", "list", "--json").out)["runtimes"]
    assert [(row["name"], row["torch"], row["in_force"]) for row in rows] == [("native-1.0", "9.9", False), ("native-1.1", "9.9", True)]
    refused = ctl("--state-dir", tmp_path, "runtime", "remove", "native-1.1")
    assert (refused.code, "is in force" in refused.err) == (1, True)
    assert ctl("--state-dir", tmp_path, "runtime", "use", "native-1.0").code == 0
    assert current_runtime(tmp_path) == tmp_path / "runtimes/native-1.0"
    assert ctl("--state-dir", tmp_path, "runtime", "remove", "native-1.1").code == 0
    missing = ctl("--state-dir", tmp_path, "runtime", "use", "native-1.1")
    assert (missing.code, "there are: native-1.0" in missing.err) == (1, True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    """What to do instead."""
    tmp_path.chmod(0o500)
    with pytest.raises(ApplianceError, match="as root"):
        setup_config.write(tmp_path, {"model.path": "/srv/a"}, may_replace=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--demo", "--model", "/srv/x"), "two models"),
        (("--yes",), "say what to set up"),
        (("--model", "/nowhere", "--yes"), "/nowhere"),
    ],
)
def test_what_cannot_be_set_up_is_told(ctl: Ctl, tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    """Before anything is fetched."""
    said = ctl("--state-dir", tmp_path, "setup", *arguments)
    assert said.code != 0
    assert words in said.err


def _model(folder: Path, weight_bytes: int) -> Path:
    """A Llama of the given size whose weights are a hole in the file."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1000, "max_position_embeddings": 2048,
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    header = json.dumps({"model.norm.weight": {"dtype": "BF16", "shape": [weight_bytes // 2], "data_offsets": [0, weight_bytes]}}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + weight_bytes)
    return folder


def test_the_plan_is_written_with_its_reason(tmp_path: Path) -> None:
    """Keys that the schema knows, and a sentence with the number of tokens."""
    found = planned(_model(tmp_path / "small", 1 << 20), Config())
    setup_config.write(tmp_path / "conf.d", found.values, may_replace=False)
    (tmp_path / "appliance.toml").touch()
    config = load_config(tmp_path / "appliance.toml").config
    assert config.model.path == str(tmp_path / "small")
    assert config.engine.kv_pool_bytes == found.values["engine.kv_pool_bytes"]
    assert "tokens, context 2,048" in found.sentence


def test_a_model_that_is_too_large_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    """With what would say more."""
    with pytest.raises(BudgetError, match="does not fit into this machine") as caught:
        planned(_model(tmp_path / "large", 1 << 42), Config())
    assert "appliancectl plan --engine native" in str(caught.value)
