"""How many engines there are, and what each is given."""

from __future__ import annotations

from dataclasses import replace

import pytest

from appliance.config import load_config
from appliance.config.schema import Config, EngineTable, GpuTable, SupervisorTable
from appliance.core.errors import ConfigError
from appliance.core.units import GIB
from appliance.supervisor.layout import Layout, Machine, host_memory, laid_out

ONE, TWO = ("0000:01:00",), ("0000:01:00", "0000:02:00")


def machine(cards: tuple[str, ...] = TWO, memory_bytes: int = 64 * GIB) -> Machine:
    """With eight cores."""
    return Machine(cards, 8, memory_bytes)


def config(layout: str, mode: str = "auto", **engine: object) -> Config:
    """Of SGLang, unless said otherwise."""
    table = EngineTable(**{"backend": "sglang", **engine})  # type: ignore[arg-type]
    return replace(Config(), gpu=GpuTable(layout=layout, mode=mode), engine=table)


def test_an_engine_on_each_card() -> None:
    """Each goes over one card, and reboots nothing by itself."""
    layout = laid_out(config("replicas"), machine(), uses_gpu=True)
    assert [(share.card, share.refusal) for share in layout.shares] == [(TWO[0], ""), (TWO[1], "")]
    assert "an engine on each of 2 cards" in layout.words
    whole = replace(config("replicas", weight_holder=True), supervisor=SupervisorTable(auto_reboot="always"))
    narrowed = layout.of(whole)
    assert (narrowed.engine.tensor_parallel, narrowed.engine.threads, narrowed.engine.weight_holder) == (1, 4, False)
    assert narrowed.supervisor.auto_reboot == "never"
    assert layout.of(config("replicas", threads=3)).engine.threads == 3, "the owner's word counts"
    assert "weight_holder is off" in laid_out(whole, machine(), uses_gpu=True).words


@pytest.mark.parametrize("layout", ["auto", "single"])
def test_as_before(layout: str) -> None:
    """Nothing is changed and nothing said."""
    assert laid_out(config(layout), machine(), uses_gpu=True) == Layout()
    assert Layout().of(config(layout)) == config(layout)


def test_one_engine_over_all_cards() -> None:
    """As many as there are, unless the owner counted them."""
    assert laid_out(config("tp"), machine(), uses_gpu=True).of(config("tp")).engine.tensor_parallel == 2
    assert laid_out(config("tp", tensor_parallel=4), machine(), uses_gpu=True) == Layout()
    assert laid_out(config("tp"), machine(ONE), uses_gpu=True) == Layout()


@pytest.mark.parametrize(
    ("mode", "uses_gpu", "cards", "words"),
    [
        ("auto", True, ONE, "this machine has one card"),
        ("auto", True, (), "this machine has no card"),
        ("off", True, TWO, "gpu.mode is off"),
        ("auto", False, TWO, "the sglang engine computes on the CPU"),
    ],
)
def test_one_engine_all_the_same(mode: str, uses_gpu: bool, cards: tuple[str, ...], words: str) -> None:
    """Where there is nothing to be shared out; the log says why."""
    layout = laid_out(config("replicas", mode), machine(cards), uses_gpu=uses_gpu)
    assert layout.shares == ()
    assert words in layout.words
    assert layout.of(config("replicas")) == config("replicas")


@pytest.mark.parametrize("words", [("--hicache-size", "40"), ("--hicache-size=40",)])
def test_memory_that_is_not_there_twice(words: tuple[str, ...]) -> None:
    """The machine's memory goes to the first; the second is told how much was asked, by which option, how much there is, and the cure."""
    first, second = laid_out(config("replicas", extra_args=words), machine(memory_bytes=64 * GIB), uses_gpu=True).shares
    assert first.refusal == ""
    for word in ("2 times 37.25 GiB", "--hicache-size 40", "64.00 GiB", "enough for 1", "gpu.layout"):
        assert word in second.refusal
    both = laid_out(config("replicas", extra_args=words), machine(memory_bytes=128 * GIB), uses_gpu=True).shares
    assert [share.refusal for share in both] == ["", ""]


def test_what_is_taken_of_the_machine_is_read_where_it_is_said() -> None:
    """The built-in engine's KV cache lies there; of others the options that we know, in their units; what is no number is the engine's."""
    assert host_memory(config("replicas", backend="native", kv_pool_bytes=GIB, swap_bytes=GIB))[0] == 2 * GIB
    assert host_memory(config("replicas", extra_args=("--swap-space", "4", "--cpu-offload-gb=2")))[0] == 6 * GIB
    assert host_memory(config("replicas", extra_args=("--cache-ram", "2048")))[0] == 2 * GIB
    assert host_memory(config("replicas", extra_args=("--swap-space", "much", "--hicache-size", "inf", "--swap-space")))[0] == 0
    assert host_memory(config("replicas"))[0] == 0


@pytest.mark.parametrize("layout", ["single", "replicas"])
def test_a_layout_and_a_count_that_contradict_each_other_are_refused(layout: str) -> None:
    """Both keys and the cure are named."""
    with pytest.raises(ConfigError) as refused:
        load_config(None, {"gpu.layout": layout, "engine.tensor_parallel": 2, "engine.backend": "sglang"})
    for word in ("gpu.layout", layout, "engine.tensor_parallel = 2", '"tp"'):
        assert word in str(refused.value)
    load_config(None, {"gpu.layout": "tp", "engine.tensor_parallel": 2, "engine.backend": "sglang"})
