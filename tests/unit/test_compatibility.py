"""What does not fit a machine is named with both numbers; what fits, or cannot be told, is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.compatibility import Card, Host, capability_of, driver_of, judge_weights, mismatches, needs_of, this_host

RTX3090 = Card("NVIDIA GeForce RTX 3090", (8, 6))
GTX1080 = Card("NVIDIA GeForce GTX 1080", (6, 1))


def test_cuda_13_on_driver_535_is_named_by_both() -> None:
    """Which package brings it, what it needs, what is here, and what to do."""
    needs = needs_of("sglang 0.5.23", "sglang", {"torch": "2.11.0", "nvidia-cuda-runtime": "13.0.96"})
    (sentence,) = mismatches(needs, Host("535.183.01", (RTX3090,)))
    assert sentence == (
        "sglang 0.5.23 brings CUDA 13.0 (nvidia-cuda-runtime 13.0.96), which needs driver 580.65.06 or newer; this machine has 535.183.01: "
        "upgrade the driver, or install a version of sglang that was built for CUDA 12"
    )


@pytest.mark.parametrize(("driver", "fits"), [("580.65.06", True), ("580.65.05", False), ("595.45", True), ("1000.1", True), ("", True)])
def test_versions_are_compared_as_numbers(driver: str, fits: bool) -> None:
    """And a machine without a driver is not judged: it may be one that only makes the environment."""
    sentences = list(mismatches(needs_of("v", "vllm", {"nvidia-cuda-runtime": "13.0.96"}), Host(driver)))
    assert len(sentences) == (0 if fits else 1)


@pytest.mark.parametrize(
    ("packages", "cuda"),
    [
        ({"nvidia-cuda-runtime-cu12": "12.8.90"}, "12.8"),
        ({"torch": "2.8.0+cu126"}, "12.6"),
        ({"torch": "2.13.0+cpu"}, ""),
        ({"torch": "2.13.0"}, ""),
        ({"cuda-toolkit": "13.0.2"}, "13.0"),
        ({"nvidia-cuda-runtime-tools": "13.0"}, ""),
    ],
)
def test_an_environment_says_its_cuda_by_its_packages(packages: dict[str, str], cuda: str) -> None:
    """The runtime's own package, or how torch was built."""
    assert needs_of("x", "vllm", packages).cuda == cuda


def test_each_card_that_is_too_old_is_named() -> None:
    """By its name and number; the other one is not."""
    needs = needs_of("vllm 0.32", "vllm", {"nvidia-cuda-runtime-cu12": "12.8.90"})
    (sentence,) = mismatches(needs, Host("595.45", (RTX3090, GTX1080, Card("unknown"))))
    assert "needs compute capability 7.0 or newer; the card NVIDIA GeForce GTX 1080 has 6.1 (sm_61)" in sentence


@pytest.mark.parametrize(
    ("config", "card", "words", "refused"),
    [
        ({"quant_method": "fp8"}, RTX3090, "unpacked to 16 bits", False),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, RTX3090, "unpacked to 16 bits", False),
        ({"quant_method": "fp8"}, Card("T4", (7, 5)), "none of the engines unpacks them", True),
        ({"quant_method": "fp8"}, Card("L4", (8, 9)), "", False),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, RTX3090, "4-bit floats", False),
        ({"quant_method": "awq"}, Card("T4", (7, 5)), "", False),
        ({"quant_method": "fp8"}, Card("of no known kind"), "", False),
        (None, RTX3090, "", False),
        ("odd", RTX3090, "", False),
    ],
)
def test_weights_that_the_card_has_no_numbers_for(config: object, card: Card, words: str, refused: bool) -> None:
    """sm_86 with fp8 weights is slower than it looks; older cards cannot."""
    verdict = judge_weights({"quantization_config": config}, card)
    assert (words in verdict.sentence, bool(verdict.sentence), verdict.refused) == (True, bool(words), refused)
    if words:
        assert f"sm_{card.capability[0]}{card.capability[1]}" in verdict.sentence  # type: ignore[index]


def test_the_machine_is_read_from_its_files(tmp_path: Path) -> None:
    """The kernel module's version as the driver writes it; nothing where there is none."""
    assert driver_of(tmp_path) == ""
    (tmp_path / "driver/nvidia").mkdir(parents=True)
    (tmp_path / "driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\nGCC version: gcc version 12.2.0\n"
    )
    assert driver_of(tmp_path) == "535.183.01"
    assert this_host("535.183.01", [RTX3090]).glibc.startswith("2.")
    assert [capability_of(text) for text in ("8.6", " 12.0", "[N/A]", "")] == [(8, 6), (12, 0), None, None]
