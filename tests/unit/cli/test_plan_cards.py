"""`appliancectl plan` and `config check` for several cards: the layout, what is off between cards, and what this box has not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from appliance.cli.checks import configured
from appliance.cli.checks.machine import Level, Machine
from appliance.config import load_config
from tests.fakes.cards import make_box
from tests.unit.cli.conftest import Ctl
from tests.unit.planner import shapes

ROW = "NVIDIA GeForce RTX 3090, 24576, 24200, GPU-{0}, 00000000:0{0}:00.0"


@pytest.fixture
def wanted(tmp_path: Path) -> list[str]:
    """A model that fits one card, on any engine."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(shapes.hybrid_27b()))
    return ["plan", "--model", str(file), "--weights", "15GiB", "--linear-state", "0.73GiB", "--kv-dtype", "fp8_e4m3"]


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts an nvidia-smi into PATH that lists so many RTX 3090s, and says this of their NVLink."""

    def put(cards: int, nvlink: str = "") -> None:
        folder = tmp_path / "bin"
        folder.mkdir()
        rows = "\n".join(ROW.format(index) for index in range(1, cards + 1))
        (folder / "nvidia-smi").write_text(f"#!/bin/sh\ncase \"$1\" in nvlink) echo '{nvlink}';; *) echo '{rows}';; esac\n")
        (folder / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    return put


def configured_as(tmp_path: Path, text: str) -> list[str]:
    """The options that name this configuration."""
    file = tmp_path / "appliance.toml"
    file.write_text(text)
    return ["--config", str(file)]


def choice(ctl: Ctl, *words: str) -> dict[str, Any]:
    """The choice that a plan comes to."""
    answer: dict[str, Any] = json.loads(ctl(*words, "--json").out)
    return {**answer["choice"], "flags": answer["flags"], "all_tokens": answer["choice"]["all_engines"]["kv_tokens"]}


@pytest.mark.parametrize(("engine", "more"), [("sglang", []), ("vllm", ["--kv-pool", "4GiB"])])
def test_the_launch_line_of_two_consumer_cards(ctl: Ctl, wanted: list[str], engine: str, more: list[str]) -> None:
    """Without P2P and the engine's own all-reduce, with the reason as a note; two A100s have both, and so has who wants them."""
    two = [*wanted, *more, "--engine", engine, "--tp", "2", "--gpu"]
    line = ctl(*two, "rtx3090", "--flags").out
    assert line.startswith("NCCL_P2P_DISABLE=1 ")
    assert "--disable-custom-all-reduce" in line
    said = choice(ctl, *two, "rtx3090")
    assert "--disable-custom-all-reduce" in said["flags"]
    assert said["environment"]["NCCL_P2P_DISABLE"] == "1"
    assert any("P2P and the engine's own all-reduce are off" in note for note in said["warnings"])
    assert "2 × rtx3090 without NVLink" in ctl(*two, "rtx3090").out
    for others in ([*two, "a100"], [*two, "rtx3090", "--p2p", "on"]):
        line = ctl(*others, "--flags").out
        assert "--disable-custom-all-reduce" not in line
        assert "NCCL_P2P_DISABLE" not in line
        assert "all-reduce" not in ctl(*others).out
    assert "--disable-custom-all-reduce" in ctl(*two, "a100", "--p2p", "off", "--flags").out


def test_no_rung_takes_off_what_is_off(ctl: Ctl, wanted: list[str]) -> None:
    """After a hang between two consumer cards one card is left; between two A100s P2P goes first."""
    two = [*wanted, "--weights", "8GiB", "--tp", "2", "--after", "nccl_p2p_hang", "--json", "--gpu"]
    rungs = [json.loads(ctl(*two, card).out)["ladder"] for card in ("rtx3090", "a100")]
    assert [rung["tensor_parallel"] for rung in rungs[0]] == [1]
    assert [rung["tensor_parallel"] for rung in rungs[1]] == [2, 2, 1]


def test_an_engine_on_each_card(ctl: Ctl, wanted: list[str]) -> None:
    """The plan of one card, and what both have together; nothing is off, as nothing goes between them."""
    alone = choice(ctl, *wanted, "--gpu", "rtx3090")
    both = choice(ctl, *wanted, "--gpu", "rtx3090", "--gpus", "2", "--layout", "replicas")
    assert (both["engines"], both["tensor_parallel"], both["kv_tokens"]) == (2, 1, alone["kv_tokens"])
    assert both["all_engines"] == {"max_running": 2 * alone["max_running"], "kv_tokens": 2 * alone["kv_tokens"]}
    assert "--disable-custom-all-reduce" not in both["flags"]
    words = " ".join(ctl(*wanted, "--gpu", "rtx3090", "--gpus", "2", "--layout", "replicas").out.split())
    assert "one engine on each of 2 cards" in words
    assert f"2 × {alone['max_running']} = {2 * alone['max_running']} sequences at once and {2 * alone['kv_tokens']:,} tokens" in words


def test_one_engine_over_all_cards(ctl: Ctl, wanted: list[str]) -> None:
    """As with --tp."""
    over = choice(ctl, *wanted, "--gpu", "rtx3090", "--gpus", "2", "--layout", "tp")
    assert over == choice(ctl, *wanted, "--gpu", "rtx3090", "--tp", "2")
    assert (over["engines"], over["tensor_parallel"]) == (1, 2)


def test_the_configured_layout_counts_for_this_box(ctl: Ctl, wanted: list[str], smi: Any, tmp_path: Path) -> None:
    """For its own cards, and for cards that are counted; a card of some other box is planned alone; an option wins."""
    smi(2)
    replicas = configured_as(tmp_path, '[gpu]\nlayout = "replicas"\n')
    assert choice(ctl, *replicas, *wanted)["engines"] == 2
    assert choice(ctl, *replicas, *wanted, "--gpu", "rtx3090", "--gpus", "3")["engines"] == 3
    assert choice(ctl, *replicas, *wanted, "--gpu", "rtx3090")["engines"] == 1
    assert choice(ctl, *replicas, *wanted, "--tp", "2")["tensor_parallel"] == 2
    assert choice(ctl, *replicas, *wanted, "--layout", "tp")["tensor_parallel"] == 2
    over = configured_as(tmp_path, '[gpu]\nlayout = "tp"\n')
    assert "--disable-custom-all-reduce" in choice(ctl, *over, *wanted)["flags"]
    counted = configured_as(tmp_path, '[engine]\ntensor_parallel = 2\n[gpu]\np2p = "on"\n')
    assert choice(ctl, *counted, *wanted)["tensor_parallel"] == 2
    assert "--disable-custom-all-reduce" not in choice(ctl, *counted, *wanted)["flags"]


@pytest.mark.parametrize(("line", "is_off"), [("Link 0: 14.062 GB/s", False), ("Link 0: <inactive>", True), ("", True)])
def test_a_bridge_is_seen(line: str, is_off: bool, ctl: Ctl, wanted: list[str], smi: Any) -> None:
    """In what nvidia-smi says of the first card."""
    smi(2, line)
    assert ("--disable-custom-all-reduce" in choice(ctl, *wanted, "--tp", "2")["flags"]) == is_off


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--gpus 0", "0 cards cannot be"),
        ("--gpus 1 --tp 2", "a model over 2 cards, of which there is 1"),
        ("--layout replicas --tp 2 --gpus 4", "contradict each other"),
        ("--layout both", "'both' is not one of"),
    ],
)
def test_what_cannot_be(words: str, said: str, ctl: Ctl, wanted: list[str]) -> None:
    """A usage error with the numbers."""
    answer = ctl(*wanted, "--gpu", "rtx3090", *words.split())
    assert answer.code == 2
    assert said in answer.err


def test_a_layout_that_changes_nothing_is_said(ctl: Ctl, wanted: list[str]) -> None:
    """One card, or the built-in engine, which is planned on the machine's memory."""
    assert "because there is one card" in " ".join(ctl(*wanted, "--gpu", "rtx3090", "--layout", "replicas").out.split())


def test_more_cards_for_one_of_several_engines(ctl: Ctl, tmp_path: Path) -> None:
    """The way out of a model that fits no single card takes the layout back, so that it can be tried."""
    replicas = ["plan", "--model", "qwen3-14b", "--gpu", "rtx3090", "--gpus", "2", "--layout", "replicas"]
    refused = ctl(*replicas, "--json")
    assert refused.code == 1
    (way,) = [way for way in json.loads(refused.out)["ways_out"] if way["change"] == "2 such cards"]
    assert ctl(*replicas, *way["options"]).code == 0


@pytest.mark.parametrize(
    ("cards", "keys", "name", "said"),
    [
        (1, {"gpu.layout": "replicas", "engine.backend": "vllm"}, "gpu.layout", "this machine has one card"),
        (0, {"gpu.layout": "tp", "engine.backend": "sglang"}, "gpu.layout", "this machine has no NVIDIA card"),
        (2, {"gpu.layout": "replicas"}, "gpu.layout", "the native engine computes on the CPU"),
        (2, {"gpu.layout": "tp", "engine.backend": "vllm", "gpu.mode": "off"}, "gpu.layout", "gpu.mode is off"),
        (2, {"engine.tensor_parallel": 4, "engine.backend": "vllm"}, "engine.tensor_parallel", "and this machine has 2 cards"),
    ],
)  # fmt: skip
def test_a_layout_that_this_box_cannot_have(cards: int, keys: dict[str, object], name: str, said: str, tmp_path: Path) -> None:
    """A warning with what is there: it is served all the same, otherwise."""
    (finding,) = configured.check_layout(machine(tmp_path, cards), load_config(None, keys).config)
    assert (finding.name, finding.level) == (name, Level.WARN)
    assert said in finding.reason


@pytest.mark.parametrize("keys", [{"gpu.layout": "replicas"}, {"gpu.layout": "tp"}, {"engine.tensor_parallel": 2}, {}])
def test_a_layout_that_this_box_can_have(keys: dict[str, object], tmp_path: Path) -> None:
    """Two cards: nothing is said."""
    assert not [*configured.check_layout(machine(tmp_path, 2), load_config(None, {"engine.backend": "vllm", **keys}).config)]


def machine(folder: Path, cards: int) -> Machine:
    """With so many cards on its bus."""
    make_box(folder / "box", cards)
    return Machine(root=folder / "box")


def test_config_check_says_it(ctl: Ctl, tmp_path: Path) -> None:
    """Also for people; this machine has no two cards, or no engine that would take them."""
    said = ctl(*configured_as(tmp_path, '[gpu]\nlayout = "replicas"\n'), "config", "check", "--json")
    (finding,) = [one for one in json.loads(said.out)["findings"] if one["name"] == "gpu.layout"]
    assert "replicas" in json.dumps(finding)
