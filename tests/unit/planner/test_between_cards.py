"""Which cards may read each other's memory, and how many engines share them out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from appliance.planner.between_cards import DIRECT, Sharing, is_consumer, kept_off, shared_out, why_off
from appliance.planner.gpus import CARDS, gpu_facts


@pytest.mark.parametrize(
    "card",
    [
        "NVIDIA GeForce RTX 3090", "rtx3090", "3090", "RTX 4070 Ti SUPER", "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 5090",
        "NVIDIA GeForce RTX 3060 Laptop GPU", "GTX 1080 Ti", "NVIDIA TITAN RTX", "rtx4060ti16g",
    ],
)  # fmt: skip
def test_consumer_cards(card: str) -> None:
    """By NVML's name and by those of --gpu."""
    assert is_consumer(card)


@pytest.mark.parametrize(
    "card",
    [
        "NVIDIA A100-SXM4-80GB", "a100-80g", "NVIDIA H200", "Tesla T4", "NVIDIA RTX A6000", "Quadro RTX 6000",
        "NVIDIA RTX 6000 Ada Generation",
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "NVIDIA L40S", "a 24 GiB card", "the machine",
    ],
)  # fmt: skip
def test_other_cards(card: str) -> None:
    """For servers and workstations, and those that nobody named."""
    assert not is_consumer(card)


def test_every_card_that_we_know_is_one_or_the_other() -> None:
    """The consumer cards of the table are its RTX with a number of four digits and no letter before it."""
    found = {name for name in CARDS if is_consumer(name)}
    assert found == {name for name in CARDS if name.startswith("rtx") and name[3:7].isdigit() and "6000" not in name}


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_what_is_kept_off(engine: str) -> None:
    """Between consumer cards that a bridge does not join; never on one card; the owner's word counts more."""
    plain, bridged, server = gpu_facts("rtx3090"), replace(gpu_facts("rtx3090"), nvlinks=4), gpu_facts("a100")
    assert kept_off(plain, 2, engine) == DIRECT
    assert kept_off(replace(plain, nvlinks=0), 2, engine) == DIRECT
    assert not kept_off(bridged, 2, engine)
    assert kept_off(bridged, 4, engine) == DIRECT, "a bridge joins two of the four"
    assert not kept_off(server, 2, engine)
    assert not kept_off(plain, 1, engine, "off")
    assert not kept_off(plain, 2, engine, "on")
    assert kept_off(server, 2, engine, "off") == DIRECT
    assert not kept_off(None, 2, engine), "nothing is known of the cards: the engine's own check decides"


def test_engines_without_such_words() -> None:
    """llama.cpp and the built-in engine are told nothing of it."""
    assert not kept_off(gpu_facts("rtx3090"), 2, "llamacpp")
    assert not kept_off(gpu_facts("rtx3090"), 2, "native")


def test_the_reason() -> None:
    """One line, with the cards, and the key that switches it on; none where there is none."""
    words = why_off(gpu_facts("rtx3090"), 2)
    assert "2 × rtx3090 without NVLink" in words
    assert 'gpu.p2p = "on"' in words
    assert not why_off(gpu_facts("a100"), 2)


@pytest.mark.parametrize(
    ("layout", "cards", "tensor_parallel", "sharing"),
    [
        ("auto", 2, 1, Sharing(1, 1)), ("auto", 2, 2, Sharing(1, 2)), ("single", 2, 1, Sharing(1, 1)), ("tp", 4, 1, Sharing(1, 4)),
        ("tp", 4, 2, Sharing(1, 2)), ("tp", 1, 1, Sharing(1, 1)), ("replicas", 3, 1, Sharing(3, 1)), ("replicas", 1, 1, Sharing(1, 1)),
    ],
)  # fmt: skip
def test_layouts(layout: str, cards: int, tensor_parallel: int, sharing: Sharing) -> None:
    """What each makes of so many cards."""
    assert shared_out(layout, cards, tensor_parallel) == sharing
